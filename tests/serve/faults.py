"""Faults of a deployment: parts are killed or stopped, links cut and reset, resources taken away."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import monotonic

from tests.serve.clients import Outcome
from tests.serve.deployment import Deployment, Part, children, until
from tests.serve.hosts import Host, NoHosts
from tests.serve.judging import Fate

RECOVER_S_MAX = 180.0
AWAY_S = 1.5
HOLD_S = 4.0
"""How long something is stopped, cut or taken away: shorter than what makes a peer give up on it."""
FAILURES = (Fate.FAILED, Fate.BROKEN, Fate.BUSY)
HARMLESS = ("rank stopped", "server stopped", "disk full")
"""Faults that fail no request: what stands still for a short time goes on. It may be turned away."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was injected, and when all of the deployment was able to serve again."""

    name: str
    begun_s: float
    back_s: float

    def hits(self, outcome: Outcome) -> bool:
        """Whether a request was under way, or asked, at that time."""
        return outcome.reply.begun_s < self.back_s and outcome.reply.ended_s > self.begun_s

    def explains(self, outcome: Outcome) -> bool:
        """Whether a request may have failed by it."""
        return self.hits(outcome) and (self.name not in HARMLESS or outcome.verdict.fate is Fate.BUSY)

    def failed_after_s(self, outcome: Outcome) -> float:
        """From when its failure could be known to when its client knew it."""
        return outcome.reply.ended_s - max(self.begun_s, outcome.reply.begun_s)

    def silent_s(self, outcome: Outcome) -> float:
        """From the fault to the next byte, for one that was under way then."""
        after = [moment for moment in outcome.reply.moments if moment >= self.begun_s]
        return (min(after) if after else outcome.reply.ended_s) - self.begun_s

    def told(self, hit: list[Outcome]) -> str:
        """Its figures."""
        failures = [self.failed_after_s(each) for each in hit if each.verdict.fate in FAILURES]
        silences = [
            self.silent_s(each)
            for each in hit
            if each.verdict.fate is Fate.RIGHT and each.reply.begun_s < self.begun_s
        ]
        fates = {fate.value: num for fate in Fate if (num := sum(each.verdict.fate is fate for each in hit))}
        worst = f"failed after at most {max(failures):.2f} s" if failures else "none failed"
        went_on = (
            f"went on after {median(silences):.2f} s (median), {max(silences):.2f} s (most)"
            if silences
            else "-"
        )
        return f"{self.name}: back after {self.back_s - self.begun_s:.1f} s; {fates}; {worst}; {went_on}"


Injection = Callable[[], Awaitable[float]]
"""Injects a fault, undoes it, and returns when it began."""


@dataclass
class FaultInjector:
    """All faults that a deployment can have here, by name."""

    world: Deployment
    chance: Random
    hosts: tuple[Host, Host] | None = None
    injected: list[Fault] = field(default_factory=list)
    can_reset: bool = False
    """Whether this kernel lets connections be ended from outside."""

    def __post_init__(self) -> None:
        if self.hosts is not None:
            try:
                self.can_reset = bool(self.hosts[1].reset(self.hosts[0]))
            except (NoHosts, OSError) as reason:
                print(f"\nno connection can be reset here: {reason}")

    @property
    def kills(self) -> dict[str, Injection]:
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
    def disturbances(self) -> dict[str, Injection]:
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

    async def inject(self, name: str) -> Fault:
        """One of them, until the deployment is able to serve as before."""
        injection = {**self.kills, **self.disturbances}[name]
        begun_s = await injection()
        await asyncio.to_thread(self._until_able)
        self.injected.append(Fault(name, begun_s, monotonic()))
        return self.injected[-1]

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

        # One request at least: prompts are short, and on a busy machine two are seldom seen at once.
        until(lambda: num_running() > 0, f"{part.name} is busy", 120, 0.01)

    async def _kill_rank(self, part: Part) -> float:
        """Kills the last rank of an instance; its server starts the instance again by itself."""
        ranks, server = part.rank_pids, part.pid
        await asyncio.to_thread(self._until_busy, part)
        begun_s = monotonic()
        os.kill(ranks[-1], signal.SIGKILL)
        limit_s = begun_s + RECOVER_S_MAX
        while not await asyncio.to_thread(_is_anew, part, ranks):
            assert monotonic() < limit_s, f"{part.name} is not back\n{part.told()}"
            await asyncio.sleep(0.1)
        assert part.pid == server, "the server itself has to live on"
        return begun_s

    async def _kill_part(self, part: Part) -> float:
        """Kills a process, and starts it again on its port after a while."""
        if part in self.world.instances:
            await asyncio.to_thread(self._until_busy, part)
        begun_s = monotonic()
        await asyncio.to_thread(part.kill)
        await asyncio.sleep(AWAY_S)
        part.start()
        return begun_s

    async def _hold(self, disturbance: AbstractContextManager[None]) -> float:
        """Holds it for a time."""
        begun_s = monotonic()
        with disturbance:
            await asyncio.sleep(HOLD_S)
        return begun_s

    async def _reset(self) -> float:
        assert self.hosts is not None
        begun_s = monotonic()
        for one, other in (self.hosts, self.hosts[::-1]):
            await asyncio.to_thread(one.reset, other)
        return begun_s

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
