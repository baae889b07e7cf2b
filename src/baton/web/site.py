"""A server that listens."""

from __future__ import annotations

import asyncio
import logging
import ssl
from time import monotonic

from aiohttp import web

from baton.errors import BatonError
from baton.web.entry import Entry, House, Patience
from baton.web.lane import Lane

_SHUTDOWN_S = 2.0
_LINGER_S = 2.0
_LOOK_S = 1.0
_BACKLOG = 1024
_NEVER_S = 1e9


class _Terse(logging.Filter):
    """Input that is no HTTP is quoted by the parser's errors, keys and all: only that it came is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True


_log = logging.getLogger("baton.web.http")
_log.addFilter(_Terse())


class Site:
    """An application on a port, in the running loop."""

    def __init__(
        self,
        app: web.Application,
        ssl_context: ssl.SSLContext | None = None,
        *,
        lane: Lane | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._app = app
        self._ssl = ssl_context
        self._lane = lane
        self._patience = patience or Patience()
        self._runner: web.AppRunner | None = None
        self._house: House | None = None
        self._server: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._address = ("", 0)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._address[1]

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def url(self) -> str:
        """What a client is given."""
        return f"{'http' if self._ssl is None else 'https'}://{self.address}"

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 takes a free one. Whether it may is for `check_binding` to say, before."""
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            auto_decompress=False,  # what was signed is what was sent, and no small body becomes a large one
            handler_cancellation=True,  # a client that leaves is noticed at once
            keepalive_timeout=_NEVER_S,  # the entries see to it
            lingering_time=_LINGER_S,
            logger=_log,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        house = self._house = House(self._runner.server, self._lane, self._patience)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: Entry(house),
                host,
                port,
                backlog=_BACKLOG,
                ssl=self._ssl,
                ssl_handshake_timeout=None if self._ssl is None else self._patience.head_s_max,
            )
        except (OSError, OverflowError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise BatonError(
                f"cannot listen on {host}:{port}: {reason}; name another port, or 0 for a free one"
            ) from None
        self._address = self._server.sockets[0].getsockname()[:2]
        self._look()

    async def close(self) -> None:
        """Stops listening and ends what is still being answered."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        if self._house is not None:
            await _empty(self._house)
        if self._runner is not None:
            await self._runner.cleanup()
        for entry in list(self._house.entries) if self._house is not None else ():
            entry.abort()

    def _look(self) -> None:
        """At all connections, for those that have taken too long."""
        assert self._house is not None
        now_s = monotonic()
        for entry in list(self._house.entries):
            entry.look(now_s)
        wait_s = min(_LOOK_S, self._patience.head_s_max / 2, self._patience.idle_s_max / 2)
        self._looking = asyncio.get_running_loop().call_later(wait_s, self._look)


async def _empty(house: House) -> None:
    """Plain requests under way are answered, if that is soon; idle connections are closed."""
    await asyncio.sleep(0)  # what has come is begun before the rest is closed
    house.is_closing = True
    tasks = []
    for entry in list(house.entries):
        if entry.task is not None:
            tasks.append(entry.task)
        elif entry.is_plain:
            entry.close()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_SHUTDOWN_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
