"""kill -9 of each part in turn, under load: what becomes of requests, how soon, and what is left after.

Measured, for every request that was under way when a part was killed, or asked until it was there again:

- one that fails: the time from the kill, or from its beginning if that is later, to the failure at its
  client. A rank's end is knowable at once (its pipes and connections close), so this is held against 2 s.
- one that is answered all the same (retried, or continued elsewhere): the time from the kill to the next
  byte at its client.

The second is computing and depends on the machine; both are printed, and bounded with room for a loaded one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from time import monotonic

import pytest
from tests.serve.clients import Load, Outcome
from tests.serve.deployment import Deployment, Part, deployment, until
from tests.serve.judging import Fate
from tests.serve.questions import Catalogue
from tests.serve.resources import Bounds, Snapshot, growth
from tests.serve.test_load import SERVE, check_growth, counters, idle_snapshot, report

FAIL_S = 2.0
"""Within this a request has to fail, if it fails."""
SLACK_S = 8.0
"""For eight processes on two cores, which start a ninth at that time."""
RECOVER_S_MAX = 180.0
AWAY_S = 1.5
CALM_S = 4.0

pytestmark = pytest.mark.load


@dataclass(frozen=True, slots=True)
class Blow:
    """A part that is killed and comes back."""

    name: str
    struck_s: float
    back_s: float

    def hits(self, outcome: Outcome) -> bool:
        """Whether a request was under way, or asked, while the part was away."""
        return outcome.reply.begun_s < self.back_s and outcome.reply.ended_s > self.struck_s

    def failed_after_s(self, outcome: Outcome) -> float:
        """From when its failure could be known to when its client knew it."""
        return outcome.reply.ended_s - max(self.struck_s, outcome.reply.begun_s)

    def silent_s(self, outcome: Outcome) -> float:
        """From the kill to the next byte, for one that was under way then."""
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


FAILURES = (Fate.FAILED, Fate.BROKEN, Fate.BUSY)


async def strike_rank(part: Part) -> tuple[float, float]:
    """Kills the last rank of an instance; its server starts the instance again by itself."""
    ranks, server = part.rank_pids, part.pid
    await asyncio.to_thread(_busy, part)
    struck_s = monotonic()
    os.kill(ranks[-1], signal.SIGKILL)
    limit_s = struck_s + RECOVER_S_MAX
    while not await asyncio.to_thread(_is_anew, part, ranks):
        assert monotonic() < limit_s, f"{part.name} is not back\n{part.told()}"
        await asyncio.sleep(0.1)
    assert part.pid == server, "the server itself has to live on"
    return struck_s, monotonic()


def _busy(part: Part) -> None:
    """Until it has something to lose."""
    until(lambda: part.ask("/server_info").json["load"]["num_running"] > 1, f"{part.name} is busy", 60, 0.01)


def _is_anew(part: Part, before: list[int]) -> bool:
    assert part.is_alive, f"{part.name} ended with {part.code}\n{part.told()}"
    ranks = part.rank_pids
    return len(ranks) == len(before) and not set(ranks) & set(before) and part.is_healthy


async def strike_part(part: Part) -> tuple[float, float]:
    """Kills a process, and starts it again on its port after a while."""
    if "serve" in part.words:
        await asyncio.to_thread(_busy, part)
    struck_s = monotonic()
    await asyncio.to_thread(part.kill)
    await asyncio.sleep(AWAY_S)
    part.start()
    await asyncio.to_thread(part.wait, RECOVER_S_MAX)
    return struck_s, monotonic()


def blows(world: Deployment) -> list[tuple[str, Callable[[], Awaitable[tuple[float, float]]]]]:
    """Each part in turn."""
    router, registry = world.router, world.registry
    assert router is not None
    assert registry is not None
    return [
        ("prefill rank", lambda: strike_rank(world.prefill[0])),
        ("decode rank", lambda: strike_rank(world.decode[1])),
        ("prefill server", lambda: strike_part(world.prefill[1])),
        ("decode server", lambda: strike_part(world.decode[0])),
        ("registry", lambda: strike_part(registry)),
        ("router", lambda: strike_part(router)),
    ]


async def struck(world: Deployment, load: Load) -> list[Blow]:
    """Every part is killed once, with a calm before each blow and after the last."""
    load.is_stopped = False
    running = asyncio.create_task(load.run())
    found = []
    try:
        for name, strike in blows(world):
            await asyncio.sleep(CALM_S)
            if name == "router":
                _check_mended(await asyncio.to_thread(counters, world))
            found.append(Blow(name, *await strike()))
        await asyncio.sleep(CALM_S)
    finally:
        load.is_stopped = True
        await running
    return found


def _check_mended(done: dict[str, int]) -> None:
    """What the router did before it is killed itself: it noticed the blows, and mended what they broke."""
    print("\nuntil the router was killed:", done)
    assert done["retries"] + done["resumes"] > 0, "nothing was retried or went on elsewhere"


async def calm(load: Load, duration_s: float) -> list[Outcome]:
    """What the same clients get when nothing is killed."""
    load.is_stopped, num_before = False, len(load.outcomes)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(duration_s)
    load.is_stopped = True
    await running
    return load.outcomes[num_before:]


def test_every_part_is_killed_under_load() -> None:
    catalogue = Catalogue(seed=2, bad_share=0.1, leave_share=0.05)
    with deployment(["tp2", "pp2"], ["tp1", "pp2"], serve=SERVE, route={"local": "never"}) as world:
        catalogue.model = world.model
        load = Load(world.url, catalogue.question, num_clients=6, pause_s=0.2)
        asyncio.run(calm(load, CALM_S))
        before = idle_snapshot(world)
        found = asyncio.run(struck(world, load))
        after = idle_snapshot(world)
        report(load, after.at_s - before.at_s)
        print("since the router started again:", counters(world))
        for blow in found:
            print(blow.told([each for each in load.outcomes if blow.hits(each)]))
        assert not load.of(Fate.WRONG)
        assert _unexplained(load, found) == [], "failures that no blow explains"
        for blow in found:
            _check(blow, [each for each in load.outcomes if blow.hits(each)])
        later = asyncio.run(calm(load, CALM_S * 2))
        assert [str(each) for each in later if each.verdict.fate in (*FAILURES, Fate.WRONG)] == []
        assert any(each.verdict.fate is Fate.RIGHT for each in later)
        _check_left(world, before)


def _unexplained(load: Load, found: list[Blow]) -> list[str]:
    return [str(outcome) for outcome in load.of(*FAILURES) if not any(blow.hits(outcome) for blow in found)]


def _check(blow: Blow, hit: list[Outcome]) -> None:
    """A blow's own promise."""
    assert hit, f"nothing was under way when the {blow.name} was killed"
    failed = [each for each in hit if each.verdict.fate in FAILURES]
    late = [each for each in failed if blow.failed_after_s(each) > FAIL_S + SLACK_S]
    assert not late, f"{blow.name}: {late[0]} failed {blow.failed_after_s(late[0]):.1f} s after"
    if blow.name == "registry":
        assert not failed, f"hand-overs need no registry: {failed[0]}"
    if blow.name != "router":
        cut = [each for each in failed if each.verdict.fate is Fate.BROKEN]
        assert not cut, f"{blow.name}: the router is there, and yet {cut[0]}"


def _check_left(world: Deployment, before: Snapshot) -> None:
    """Nobody is missing, and who lived through it holds no more than before."""
    assert {part.name for part in world.parts if part.is_alive} == {part.name for part in world.parts}
    alike = Bounds(process_bytes=64 << 20, num_fds=10, num_segments=2, num_threads=12)

    def grown() -> list[str]:
        found = growth([before, idle_snapshot(world)], alike)
        return [line for line in found if not line.startswith("another process")]

    check_growth(grown)
