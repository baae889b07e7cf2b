"""A server from its start to its end: it listens at once, keeps an instance, and drains before it goes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.server.endpoints import Endpoints
from baton.server.keeper import Keeper
from baton.server.observing import Observer
from baton.server.reports import Reports
from baton.web.binding import HOST, check_binding
from baton.web.credentials import Credentials
from baton.web.edge import EdgeConfig, application
from baton.web.site import Site

FIRST_TOKEN = ("prefill", "decode")
DRAIN_S = 30.0
CLOSE_S = 10.0
LOOK_S = 1.0
"""How long an instance that ended is given to tell its requests so itself."""

_log = logging.getLogger("baton.server")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What a user says of a server."""

    instance: EngineConfig
    host: str = HOST
    port: int = 0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    first_token: str = "prefill"
    drain_s: float = DRAIN_S
    edge: EdgeConfig = field(default_factory=EdgeConfig)

    def __post_init__(self) -> None:
        if self.first_token not in FIRST_TOKEN:
            raise ConfigError(
                f"first token {self.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
            )
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}; give a number of seconds from 0")
        check_binding(self.host, has_api_key=bool(self.api_keys), has_secret=bool(self.instance.secret))


class Server:
    """One instance behind HTTP, in the running loop."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        instance = config.instance
        self._loop = asyncio.get_running_loop()
        self._observer = Observer(instance.name, instance.role)
        self.keeper = Keeper(instance, self._changed)
        self.endpoints = Endpoints(self.keeper, self._observer, instance.model, config.first_token)
        self._reports = Reports(self.keeper, self.endpoints, self._observer, instance.model)
        credentials = Credentials(config.api_keys, instance.secret or None)
        app = application(credentials, replace(config.edge, on_answer=self._observer.answered))
        app.add_routes([*self.endpoints.routes(), *self._reports.routes()])
        self._site = Site(app)
        self.ended = asyncio.Event()
        """Set when the keeper has given up."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._site.url

    async def start(self) -> None:
        """Listens, and begins to load."""
        await self._site.start(self.config.host, self.config.port)
        self._reports.url = self.url
        self.keeper.config = replace(self.keeper.config, url=self.url)
        self.keeper.start()

    async def drain(self) -> None:
        """Takes no new requests, and waits for those that are open, but not for long."""
        self.endpoints.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.endpoints.emptied.wait()
        except TimeoutError:
            _log.warning("%d requests were left after %g s", self.endpoints.num_open, self.config.drain_s)

    async def close(self) -> None:
        """Ends the instance and everything that still waits for it."""
        await asyncio.to_thread(self.keeper.close, CLOSE_S)
        await self._site.close()

    def _changed(self) -> None:
        """For the keeper, on its thread: there is another stage."""
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self.keeper.failure is not None:
            self.ended.set()
        self._loop.call_later(LOOK_S, self.endpoints.look)


async def serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serves until a signal: the first SIGTERM drains, a second signal or SIGINT ends it at once."""
    server, loop = Server(config), asyncio.get_running_loop()
    drained, interrupted = asyncio.Event(), asyncio.Event()

    def terminate() -> None:
        (interrupted if drained.is_set() else drained).set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    try:
        await server.start()
        say(f"serving at {server.url}")
        await _first(drained, interrupted, server.ended)
        if drained.is_set() and not interrupted.is_set() and not server.ended.is_set():
            draining = asyncio.ensure_future(server.drain())
            await _first(interrupted, server.ended, task=draining)
            draining.cancel()
    finally:
        await server.close()
    failure = server.keeper.failure
    if failure is not None:
        raise failure
    if interrupted.is_set() and not drained.is_set():
        raise KeyboardInterrupt


async def _first(*events: asyncio.Event, task: asyncio.Future[None] | None = None) -> None:
    """Until one of these has come about."""
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(event.wait()) for event in events]
    if task is not None:
        waits.append(task)  # type: ignore[arg-type]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            if wait is not task:
                wait.cancel()
