"""A deployment's processes: started, watched, started again, ended in order.

The registry comes first, since all others are told its address; then instances and router at once. Whatever
dies is started again with the same command on the same port, at most RESTARTS_MAX times in RESTART_WINDOW_S;
one that dies more often, or before it was ever ready, ends the deployment with its last words. At the end the
router goes first, then the instances, then the registry, so that nobody waits for somebody who has left.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

import aiohttp

from baton import settings
from baton.cli.deployment import guard
from baton.cli.deployment.child import Child
from baton.cli.deployment.options import (
    REGISTRY,
    ROUTER,
    Options,
    Part,
    instance_parts,
    registry_part,
    router_part,
)
from baton.errors import ConfigError, EngineError

RESTARTS_MAX = 3
RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.5
DRAIN_S_MAX = 45.0
"""How long a part may take to end when asked to; instances finish what they have begun."""
HURRY_S_MAX = 10.0
LOOK_S = 0.25
ASK_S_MAX = 5.0
GUARD_S_MAX = 60.0
FAILED = "restarting: "
"""How an instance's stage begins after it has failed."""

T = TypeVar("T")
Say = Callable[[str, str], None]
"""Called with the name of a part and what there is to say of it."""


class Kept:
    """One part, and the process that is it at present."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.url = ""
        self.child: Child | None = None
        self.stage = "starting"
        self.is_greeted = False
        self.is_ready = False
        self.was_ready = False
        self.deaths: deque[float] = deque()

    @property
    def port(self) -> int:
        """Where it listens, once it has said so; it keeps that port for good."""
        return int(self.url.rpartition(":")[2].rstrip("/")) if self.url else 0

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self.child is not None and self.child.is_running


class Running:
    """Every part of a deployment, by name."""

    def __init__(self, options: Options, folder: str, say: Say) -> None:
        self.options = options
        self.parts: dict[str, Kept] = {}
        self._say = say
        self._environment = settings.part_environment(secrets.token_hex(32), folder)
        self._guard = _start_guard(folder)
        self._keeping: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.parts[ROUTER].url

    @property
    def registry(self) -> str:
        """Where instances find each other."""
        return self.parts[REGISTRY].url

    async def start(self) -> None:
        """Starts every part; `ready` says when they can be asked."""
        registry = self._keep(registry_part(self.options.front.tls_words()))
        await self._unless_lost(self._greeted(registry))
        for part in instance_parts(self.options, registry.url):
            self._keep(part)
        self._keep(router_part(self.options, registry.url))

    async def ready(self, show: Callable[[Kept], None] = lambda kept: None) -> None:
        """Waits until every part is able to serve; `show` is called whenever one has got further."""
        for kept in self.parts.values():
            if not kept.is_ready:
                show(kept)
        tls = self.options.front.tls
        connector = aiohttp.TCPConnector(ssl=True if tls is None else tls.dialling())
        timeout = aiohttp.ClientTimeout(total=ASK_S_MAX)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            # The router after the others: until it has seen them it speaks of what was before.
            for is_turn in (_is_registry, _is_instance, _is_router):
                turn = [kept for kept in self.parts.values() if is_turn(kept.part)]
                await self._unless_lost(_all(self._healthy(kept, session, show) for kept in turn))

    async def lost(self) -> None:
        """Waits until a part has died for good, and raises its cause; returns when the end has begun."""
        await self._unless_lost(self._ending.wait())

    async def replace(self, part: Part) -> None:
        """Ends a part's process and starts another command in its place, on the same port."""
        kept = self.parts[part.name]
        former, kept.part = kept.child, part
        kept.is_greeted = kept.is_ready = kept.was_ready = self.parts[ROUTER].is_ready = False
        assert former is not None, "it was started"
        former.signal(signal.SIGTERM)
        await self._unless_lost(former.ended())

    def hurry(self) -> None:
        """Nothing is waited for any longer."""
        self._hurried.set()

    async def close(self) -> None:
        """Ends every part in order, by force where asking is not enough, and removes what they left."""
        self._ending.set()
        for is_turn in (_is_router, _is_instance, _is_registry):
            await self._end([kept for kept in self.parts.values() if is_turn(kept.part)])
        # What ended one of them was told, or came too late to matter.
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        assert self._guard.stdin is not None, "it was asked for"
        with suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait(GUARD_S_MAX)

    async def _end(self, kepts: Sequence[Kept]) -> None:
        """Asks, then interrupts, then kills."""
        for number, limit_s in (
            (signal.SIGTERM, DRAIN_S_MAX),
            (signal.SIGINT, HURRY_S_MAX),
            (signal.SIGKILL, HURRY_S_MAX),
        ):
            if number == signal.SIGTERM and self._hurried.is_set():
                continue
            children = [kept.child for kept in kepts if kept.child is not None and kept.is_running]
            if not children:
                return
            for child in children:
                child.signal(number)
            waiting: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(_all([child.ended() for child in children]))
            ]
            if number == signal.SIGTERM:
                waiting.append(asyncio.ensure_future(self._hurried.wait()))
            await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()

    def _keep(self, part: Part) -> Kept:
        kept = self.parts[part.name] = Kept(part)
        self._keeping.add(asyncio.create_task(self._run(kept), name=part.name))
        return kept

    async def _run(self, kept: Kept) -> None:
        """Starts a part as often as it may be started; raises what ended it for good."""
        while not self._ending.is_set():
            part = kept.part
            kept.child = child = await self._started(kept)
            code = await child.ended()
            kept.is_ready = kept.is_greeted = False
            if self._ending.is_set():
                return
            if kept.part is part:
                self._judge(kept, child, code)
                await _either(self._ending.wait(), RESTART_PAUSE_S)

    async def _started(self, kept: Kept) -> Child:
        child = await Child.start(
            kept.part.command(kept.port), self._environment, lambda line: self._heard(kept, line)
        )
        assert self._guard.stdin is not None, "it was asked for"
        with suppress(OSError):  # without a guard they are still interrupted when this process ends
            self._guard.stdin.write(f"{child.process.pid}\n".encode())
            self._guard.stdin.flush()
        if self._ending.is_set():
            child.signal(signal.SIGKILL)
        return child

    def _judge(self, kept: Kept, child: Child, code: int) -> None:
        """Raises unless the part may be started again."""
        name, words = kept.part.name, child.last_words.removeprefix("baton: ")
        if code == 2:
            raise ConfigError(f"{name}: {words}")
        # Whoever is killed has no last words.
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code} ({words})"
        if not kept.was_ready:
            raise EngineError(f"{name} {how} before it was ready")
        now_s = monotonic()
        kept.deaths.append(now_s)
        while kept.deaths[0] < now_s - RESTART_WINDOW_S:
            kept.deaths.popleft()
        if len(kept.deaths) > RESTARTS_MAX:
            often = f"{len(kept.deaths)} times within {RESTART_WINDOW_S:.0f} s"
            raise EngineError(f"{name} ended {often}; the last time it {how}")
        again = f"{len(kept.deaths)} of {RESTARTS_MAX} times in a minute"
        self._say(name, f"{how}; it is started again ({again})")

    def _heard(self, kept: Kept, line: str) -> None:
        greeting = kept.part.greeting
        if line.startswith(greeting) and not kept.is_greeted:
            kept.url, kept.is_greeted = line.removeprefix(greeting).strip(), True
        elif not is_log(line) or (kept.was_ready and not self._ending.is_set()):
            # What a log says of the start, /health says too, and the end is ours.
            self._say(kept.part.name, line)

    async def _greeted(self, kept: Kept) -> None:
        while not kept.is_greeted:
            await asyncio.sleep(LOOK_S / 5)

    async def _healthy(
        self, kept: Kept, session: aiohttp.ClientSession, show: Callable[[Kept], None]
    ) -> None:
        """Asks /health until it is 200, and tells each stage once."""
        while not kept.is_ready:
            stage = await _stage(session, kept) if kept.is_greeted else "starting"
            if stage.startswith(FAILED) and not kept.was_ready:
                # It would try again, which is for what once worked.
                raise EngineError(f"{kept.part.name} cannot start: {stage.removeprefix(FAILED)}")
            kept.is_ready = kept.is_greeted and not stage
            kept.was_ready = kept.was_ready or kept.is_ready
            if kept.is_ready or stage != kept.stage:
                kept.stage = stage or "ready"
                show(kept)
            if not kept.is_ready:
                await asyncio.sleep(LOOK_S)

    async def _unless_lost(self, waited: Awaitable[T]) -> T:
        """What is waited for, or the cause for which a part has died for good."""
        task = asyncio.ensure_future(waited)
        try:
            while not task.done():
                self._raise_loss()
                alive = [keeping for keeping in self._keeping if not keeping.done()]
                await asyncio.wait([task, *alive], return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            task.cancel()

    def _raise_loss(self) -> None:
        for keeping in self._keeping:
            if keeping.done():
                keeping.result()


@asynccontextmanager
async def running(options: Options, say: Say) -> AsyncIterator[Running]:
    """A deployment that is yet to be started, and that has ended when the block is left."""
    found = Running(options, tempfile.mkdtemp(prefix="baton-up-"), say)
    try:
        yield found
    finally:
        await found.close()


def _start_guard(folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", guard.__file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _stage(session: aiohttp.ClientSession, kept: Kept) -> str:
    """What a part says that it is still at; empty once it is able to serve."""
    try:
        async with session.get(f"{kept.url}/health") as response:
            if response.status == 200:
                return ""
            return stage_of(kept.part.name, await response.read())
    except (aiohttp.ClientError, TimeoutError):
        return kept.stage


def is_log(line: str) -> bool:
    """Whether a line begins with a date, as those of a log do."""
    return re.match(r"\d{4}-\d\d-\d\d ", line) is not None


def stage_of(name: str, body: bytes) -> str:
    """The stage in the body of a /health that is not 200; one of another form says no more than that."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "not ready"
    return said.removeprefix(f"{name} is not ready: ")


async def _all(waits: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*waits)


async def _either(waited: Awaitable[object], limit_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(waited, limit_s)


def _is_router(part: Part) -> bool:
    return part.role == ROUTER


def _is_registry(part: Part) -> bool:
    return part.role == REGISTRY


def _is_instance(part: Part) -> bool:
    return not _is_router(part) and not _is_registry(part)
