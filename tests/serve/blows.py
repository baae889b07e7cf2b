"""What befalls a deployment: parts are killed or stopped, links cut and reset, resources taken away."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import monotonic

from tests.serve.clients import Outcome
from tests.serve.deployment import Deployment, Part, children, until
from tests.serve.hosts import Host
from tests.serve.judging import Fate

RECOVER_S_MAX = 180.0
AWAY_S = 1.5
GRIP_S = 4.0
"""How long something is stopped, cut or taken away: shorter than what makes a peer give up on it."""
FAILURES = (Fate.FAILED, Fate.BROKEN, Fate.BUSY)


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that befell the deployment, and when all of it was able to serve again."""

    name: str
    struck_s: float
    back_s: float

    def hits(self, outcome: Outcome) -> bool:
        """Whether a request was under way, or asked, at that time."""
        return outcome.reply.begun_s < self.back_s and outcome.reply.ended_s > self.struck_s

    def failed_after_s(self, outcome: Outcome) -> float:
        """From when its failure could be known to when its client knew it."""
        return outcome.reply.ended_s - max(self.struck_s, outcome.reply.begun_s)

    def silent_s(self, outcome: Outcome) -> float:
        """From the blow to the next byte, for one that was under way then."""
        after = [moment for moment in outcome.reply.moments if moment >= self.struck_s]
        return (min(after) if after else outcome.reply.ended_s) - self.struck_s

    def told(self, hit: list[Outcome]) -> str:
        """Its figures."""
        failures = [self.failed_after_s(each) for each in hit if each.verdict.fate in FAILURES]
        silences = [
            self.silent_s(each)
            for each in hit
            if each.verdict.fate is Fate.RIGHT and each.reply.begun_s < self.struck_s
        ]
        fates = {fate.value: num for fate in Fate if (num := sum(each.verdict.fate is fate for each in hit))}
        worst = f"failed after at most {max(failures):.2f} s" if failures else "none failed"
        went_on = (
            f"went on after {median(silences):.2f} s (median), {max(silences):.2f} s (most)"
            if silences
            else "-"
        )
        return f"{self.name}: back after {self.back_s - self.struck_s:.1f} s; {fates}; {worst}; {went_on}"


Strike = Callable[[], Awaitable[float]]
"""Strikes, undoes it, and returns when it struck; `Blows.strike` waits until all are able again."""


@dataclass
class Blows:
    """All that can befall a deployment, by name."""

    world: Deployment
    chance: Random
    hosts: tuple[Host, Host] | None = None
    struck: list[Blow] = field(default_factory=list)
    can_reset: bool = False
    """Whether this kernel lets connections be ended from outside."""

    def __post_init__(self) -> None:
        self.can_reset = self.hosts is not None and bool(self.hosts[1].reset(self.hosts[0]))

    @property
    def kills(self) -> dict[str, Strike]:
        """Processes end, and start again."""
        world = self.world
        assert world.router is not None
        assert world.registry is not None
        router, registry = world.router, world.registry
        return {
            "prefill rank killed": lambda: self._kill_rank(self.chance.choice(world.prefill)),
            "decode rank killed": lambda: self._kill_rank(self.chance.choice(world.decode)),
            "prefill server killed": lambda: self._kill_part(self.chance.choice(world.prefill)),
            "decode server killed": lambda: self._kill_part(self.chance.choice(world.decode)),
            "registry killed": lambda: self._kill_part(registry),
            "router killed": lambda: self._kill_part(router),
        }

    @property
    def grips(self) -> dict[str, Strike]:
        """Everybody lives through these."""
        found = {
            "rank stopped": lambda: self._hold(self._stopped(self.chance.choice(self._instance().rank_pids))),
            "server stopped": lambda: self._hold(self._stopped(self._instance().pid)),
            "disk full": lambda: self._hold(self._no_files_grow(self._instance())),
            "no descriptors left": lambda: self._hold(self._no_descriptors(self._instance())),
        }
        if self.hosts is not None:
            found["network cut"] = lambda: self._hold(self._cut())
        if self.can_reset:
            found["connections reset"] = self._reset
        return found

    async def strike(self, name: str) -> Blow:
        """One of them, until the deployment is able to serve as before."""
        strike = {**self.kills, **self.grips}[name]
        struck_s = await strike()
        await asyncio.to_thread(self._until_able)
        self.struck.append(Blow(name, struck_s, monotonic()))
        return self.struck[-1]

    def _until_able(self) -> None:
        """Every part is healthy and the router sees it."""
        world = self.world
        for part in world.parts:
            part.wait(RECOVER_S_MAX)
        wanted = {part.name: "able" for part in world.instances}
        until(lambda: self._states() == wanted, lambda: f"{wanted}, but {self._states()}", RECOVER_S_MAX)

    def _states(self) -> dict[str, str]:
        answer = self.world.ask("/server_info")
        return {each["name"]: each["state"] for each in answer.json["instances"]}

    def _instance(self) -> Part:
        return self.chance.choice(self.world.instances)

    def _until_busy(self, part: Part) -> None:
        """It has something to lose."""

        def num_running() -> int:
            info = part.ask("/server_info", key=self.world.want.api_key).json
            return int(info["load"]["num_running"])

        until(lambda: num_running() > 1, f"{part.name} is busy", 60, 0.01)

    async def _kill_rank(self, part: Part) -> float:
        """Kills the last rank of an instance; its server starts the instance again by itself."""
        ranks, server = part.rank_pids, part.pid
        await asyncio.to_thread(self._until_busy, part)
        struck_s = monotonic()
        os.kill(ranks[-1], signal.SIGKILL)
        limit_s = struck_s + RECOVER_S_MAX
        while not await asyncio.to_thread(_is_anew, part, ranks):
            assert monotonic() < limit_s, f"{part.name} is not back\n{part.told()}"
            await asyncio.sleep(0.1)
        assert part.pid == server, "the server itself has to live on"
        return struck_s

    async def _kill_part(self, part: Part) -> float:
        """Kills a process, and starts it again on its port after a while."""
        if part in self.world.instances:
            await asyncio.to_thread(self._until_busy, part)
        struck_s = monotonic()
        await asyncio.to_thread(part.kill)
        await asyncio.sleep(AWAY_S)
        part.start()
        return struck_s

    async def _hold(self, grip: Iterator[None]) -> float:
        """Holds it for a time."""
        struck_s = monotonic()
        with grip:
            await asyncio.sleep(GRIP_S)
        return struck_s

    async def _reset(self) -> float:
        assert self.hosts is not None
        struck_s = monotonic()
        for one, other in (self.hosts, self.hosts[::-1]):
            await asyncio.to_thread(one.reset, other)
        return struck_s

    @contextmanager
    def _cut(self) -> Iterator[None]:
        assert self.hosts is not None
        self.hosts[0].cut()
        try:
            yield
        finally:
            self.hosts[0].mend()

    @contextmanager
    def _stopped(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _no_files_grow(self, part: Part) -> Iterator[None]:
        """As on a full disk: what it writes to a file fails."""
        with _limited(_pids(part), resource.RLIMIT_FSIZE, lambda pid: 0):
            yield

    @contextmanager
    def _no_descriptors(self, part: Part) -> Iterator[None]:
        """It can open nothing and accept nobody."""
        with _limited(_pids(part), resource.RLIMIT_NOFILE, lambda pid: len(os.listdir(f"/proc/{pid}/fd"))):
            yield


def _pids(part: Part) -> list[int]:
    return [part.pid, *children(part.pid), *part.rank_pids]


@contextmanager
def _limited(pids: list[int], what: int, limit: Callable[[int], int]) -> Iterator[None]:
    before = {pid: resource.prlimit(pid, what) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, what, (limit(pid), hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, what, limits)


def _is_anew(part: Part, before: list[int]) -> bool:
    assert part.is_alive, f"{part.name} ended with {part.code}\n{part.told()}"
    ranks = part.rank_pids
    return len(ranks) == len(before) and not set(ranks) & set(before) and part.is_healthy
