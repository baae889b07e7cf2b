"""A server of the tiny model in this process, its loop on a thread of its own."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.serve.parts import Answer, ask
from tests.serve.speaking import model

from baton.engine.config import EngineConfig
from baton.engine.instance import Instance
from baton.serving.server import Server, ServerConfig

WAIT_S_MAX = 300.0
POOL_TOKENS = 1024
CONTEXT = 512


def until(holds: Callable[[], Any], what: str) -> Any:
    """Waits for a condition of another thread or process."""
    limit_s = time.monotonic() + WAIT_S_MAX
    while not (found := holds()):
        assert time.monotonic() < limit_s, f"not within {WAIT_S_MAX:.0f} s: {what}"
        time.sleep(0.02)
    return found


class Live:
    """A running server, as tests reach it."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.server.url

    @property
    def model(self) -> str:
        """The name that it serves."""
        return self.server.config.instance.model

    @property
    def instance(self) -> Instance:
        """The instance that runs now."""
        return self.server.supervisor.running()

    def ask(self, path: str, body: Any = None, key: str | None = None, method: str | None = None) -> Answer:
        """One request."""
        return ask(self.url, path, body, key, method)

    def metric(self, line: str) -> float:
        """A figure by its whole name and labels, but for the model's."""
        for found in self.ask("/metrics").text.splitlines():
            name, _, value = found.rpartition(" ")
            if re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "") == line:
                return float(value)
        return 0.0

    def is_idle(self) -> bool:
        """Whether nothing is open and every page is back."""
        load = self.instance.load()
        busy = load.num_running + load.num_waiting + len(self.server.open)
        return not busy and load.pages.free == load.pages.total > 0

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs something on the server's loop."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(WAIT_S_MAX)


@contextmanager
def live(config: ServerConfig | None = None, **changes: Any) -> Iterator[Live]:
    """A server that is ready; `changes` are fields of its instance's configuration."""
    instance = EngineConfig(
        str(model()), pool_tokens=POOL_TOKENS, context_max=CONTEXT, num_threads=1, silence_s=30.0
    )
    config = config or ServerConfig(instance)
    config = replace(config, instance=replace(config.instance, **changes))
    ready: Future[tuple[Server, asyncio.AbstractEventLoop]] = Future()
    ending: Future[asyncio.Event] = Future()

    async def run() -> None:
        server, ended = Server(config), asyncio.Event()
        await server.start()
        ready.set_result((server, asyncio.get_running_loop()))
        ending.set_result(ended)
        await ended.wait()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    found = None
    try:
        found = Live(*ready.result(WAIT_S_MAX))
        until(
            lambda: found.server.supervisor.is_ready or found.server.supervisor.failure, "the instance is up"
        )
        assert found.server.supervisor.failure is None, found.server.supervisor.failure
        yield found
    finally:
        if found is not None:
            found.loop.call_soon_threadsafe(ending.result(WAIT_S_MAX).set)
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()
