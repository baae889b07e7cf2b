"""The production world of drivers: one thread with an asyncio loop.

It listens, dials and shakes hands; hands messages, completions of the data transport and the time to drivers;
and runs their jobs on workers. A peer that misbehaves loses its link. A driver that fails, or a loop that
dies, ends the instance loudly: nothing is recovered in place.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from baton.errors import ConfigError, LocalProtocolError
from baton.protocol.peer import Party
from baton.session.link_ports import LOCAL, Directory, DriverPorts, World
from baton.session.link_sockets import SocketConfig, Sockets
from baton.session.link_turns import TurnLoop, Turns
from baton.session.ports import Driven
from baton.transport.base import Event, Transport

__all__ = ["LOCAL", "Directory", "DriverPorts", "Loop", "NoDirectory", "SocketConfig", "exit_loudly"]


def exit_loudly(cause: str) -> None:
    """Ends the process at once, with one line that says why."""
    print(f"baton: this instance ends: {cause}", file=sys.stderr, flush=True)
    os._exit(1)


class NoDirectory:
    """Finds nobody and tells nobody: every address is given by hand."""

    async def look_up(self, instance: str) -> str:
        """There is nowhere to look."""
        raise ConfigError(f"no registry to find {instance} in; give its address, host:port, or a registry")

    async def serve(self, address: str) -> None:
        """There is nobody to tell."""

    async def close(self) -> None:
        """There is nothing to close."""


class Loop:
    """Runs drivers: first `ports` and `add` for each, then `start`; `close` from any thread."""

    def __init__(
        self,
        config: SocketConfig,
        *,
        directory: Directory | None = None,
        on_end: Callable[[str], None] = exit_loudly,
        num_workers: int = 1,
    ) -> None:
        self._turns = Turns(on_end)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="baton-worker")
        sockets = Sockets(config, self._turns)
        self._world = World(self._turns, sockets, self._workers, directory or NoDirectory(), [])
        self._watched: list[tuple[Transport, Callable[[list[Event]], None]]] = []
        self._thread = threading.Thread(target=self._run, name="baton-loop", daemon=True)
        self._started: Future[None] = Future()

    @property
    def address(self) -> str:
        """Where it listens, once started; empty if no driver accepts links."""
        return self._world.sockets.address

    def ports(self, party: Party) -> DriverPorts:
        """What a driver of this party is to be built with."""
        return DriverPorts(self._world, party)

    def add(self, ports: DriverPorts, driver: Driven) -> None:
        """Runs a driver behind its ports; before `start`."""
        self._check_new()
        if ports.party.accepts and any(end.party.accepts for end in self._world.ends):
            raise LocalProtocolError("a loop has one driver that accepts links; give the other its own loop")
        ports.driver = driver
        self._world.ends.append(ports)
        self._turns.after.append(ports.arm)

    def watch(self, transport: Transport, moved: Callable[[list[Event]], None]) -> None:
        """Tells a driver what a data transport has to say; before `start`."""
        self._check_new()
        self._watched.append((transport, moved))

    def start(self) -> None:
        """Begins; raises if it cannot listen."""
        self._check_new()
        self._thread.start()
        self._started.result()

    def post(self, action: Callable[[], None]) -> None:
        """From any thread: does something as if a driver had been called; after the end, nothing."""
        self._turns.post(action)

    def close(self) -> None:
        """Sends what is queued, then ends links, workers and the thread."""
        if self._thread.ident is None:
            self._workers.shutdown()
            return
        self._turns.post(self._turns.stopped.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_new(self) -> None:
        if self._thread.ident is not None:
            raise LocalProtocolError("the loop was started already; add drivers before `start`")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: TurnLoop(self._turns.end_turn)) as runner:
                runner.run(self._serve())
        finally:
            self._turns.die()
            if not self._started.done():
                self._started.set_exception(LocalProtocolError("the control loop died before it ran"))
            self._workers.shutdown(cancel_futures=True)

    async def _serve(self) -> None:
        turns, aio = self._turns, asyncio.get_running_loop()
        turns.aio = aio
        acceptor = next((end for end in self._world.ends if end.party.accepts), None)
        try:
            if acceptor is not None:
                await self._world.sockets.listen(acceptor)
        except ConfigError as error:
            turns.close()
            self._started.set_exception(error)
            return
        for transport, moved in self._watched:
            aio.add_reader(transport.fileno(), partial(turns.step, _move, transport, moved))
        self._started.set_result(None)
        turns.open(aio)
        await turns.stopped.wait()
        await self._shut()

    async def _shut(self) -> None:
        self._turns.close()
        for transport, _ in self._watched:
            asyncio.get_running_loop().remove_reader(transport.fileno())
        for end in self._world.ends:
            end.disarm()
        await self._world.sockets.close()
        await self._world.directory.close()


def _move(transport: Transport, moved: Callable[[list[Event]], None]) -> None:
    if events := transport.poll():
        moved(events)
