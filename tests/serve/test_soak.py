"""Mixed load on unlike layouts behind the router, with every fault that can be injected here.

BATON_LOAD_S says how long (default 300 s; an hour is `make soak`). After a warm-up, the first half has what
everybody lives through: clients that leave, processes that stand still, a network that is cut and reset, a
full disk, no descriptors. Nobody may end, and the memory of no process may grow. In the second half every
part is killed too. All the time an answer is right, or a clean error that a fault explains; at the end every
page is free. Where network namespaces are allowed, prefill and decode are on two hosts.

For a request that was under way when a part was killed, or asked until it was there again: if it fails, it
fails within 2 s (a rank's end is knowable at once, by its pipes and connections), with room for a loaded
machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random
from time import monotonic

import pytest
from tests.serve.clients import Load, Outcome
from tests.serve.deployment import Deployment, deployment, until
from tests.serve.faults import FAILURES, Fault, FaultInjector
from tests.serve.hosts import NoHosts, two_hosts
from tests.serve.judging import Fate, Reply, Verdict
from tests.serve.questions import COMPLETIONS, CONTEXT_MAX, Catalogue, Question
from tests.serve.resources import Bounds, Snapshot, growth, lost_pages, server_pages, slope_per_s, snapshot

from baton.serving.fleet import IDLE_S_MAX

LOAD_S = float(os.environ.get("BATON_LOAD_S", "300"))
CALM_S = 4.0
NUM_FAULTS = 3
"""Between two looks at the deployment while it is idle."""
FAIL_S = 2.0
SLACK_S = 8.0
"""For nine processes on two cores, which start a tenth at that time."""
PAGES_S_MAX = 120.0
GROWTH_PER_MIN = 1 << 20
GROWTH_MIN = 24 << 20
"""What memory may move by in a few minutes without a trend."""
ROUTE = {"local": "never"}
"""A tiny model prefills faster than it hands over: left to itself the router would hardly hand over."""
SERVE = {"pool-tokens": "8192", "context": str(CONTEXT_MAX), "chunk-tokens": "256", "queue": "64"}
COUNTERS = ("handoffs", "local_prefills", "retries", "resumes", "given_up", "disconnects")

KEY = secrets.token_hex(16)

pytestmark = pytest.mark.load


class Soak:
    """A deployment under load, with faults."""

    def __init__(self, world: Deployment, injector: FaultInjector, load: Load) -> None:
        self.world = world
        self.injector = injector
        self.load = load

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Clients ask; requests under way are finished."""
        self.load.is_stopped = False
        running = asyncio.create_task(self.load.run())
        try:
            yield
        finally:
            self.load.is_stopped = True
            await running

    async def calm(self, duration_s: float) -> list[Outcome]:
        """What clients get without faults."""
        num_before = len(self.load.outcomes)
        async with self.loaded():
            await asyncio.sleep(duration_s)
        return self.load.outcomes[num_before:]

    async def disturbed(self, names: list[str], duration_s: float) -> list[Snapshot]:
        """Each of these faults at least once, then again until the time is over; idle looks now and then."""
        seen, waiting = [idle_snapshot(self.world)], list(names)
        limit_s = monotonic() + duration_s
        while monotonic() < limit_s or not set(names) <= {fault.name for fault in self.injector.injected}:
            async with self.loaded():
                for _ in range(NUM_FAULTS):
                    await asyncio.sleep(CALM_S)
                    waiting = waiting or self.injector.chance.sample(names, len(names))
                    await self.injector.inject(waiting.pop(0))
                await asyncio.sleep(CALM_S)
            seen.append(idle_snapshot(self.world))
        return seen

    def report(self) -> None:
        """Figures on stdout, which `make soak` shows."""
        print(f"\n{len(self.load.outcomes)} requests: {self.load.tally()}")
        for outcome in self.load.of(Fate.WRONG)[:10]:
            print(f"  {outcome}")
        for fault in self.injector.injected:
            print(fault.told([each for each in self.load.outcomes if fault.hits(each)]))

    @property
    def unexplained(self) -> list[str]:
        """Failures that no fault explains, and requests that never ended."""
        return [
            str(outcome)
            for outcome in self.load.of(*FAILURES)
            if "no end after" in outcome.reply.trouble
            or not any(fault.explains(outcome) for fault in self.injector.injected)
        ]


def idle_snapshot(world: Deployment) -> Snapshot:
    """Once nothing is under way and every page is free again."""
    until(lambda: not lost(world), lambda: f"pages return: {lost(world)}", PAGES_S_MAX)
    return snapshot(world)


def lost(world: Deployment) -> list[str]:
    """Instances that hold pages now."""
    return lost_pages({part.name: server_pages(world, part.name) for part in world.instances})


def check_growth(found: Callable[[], list[str]]) -> None:
    """Nothing grew, once the router has closed the connections that the last requests left idle."""
    until(lambda: not found(), lambda: f"no growth, but {found()}", 2 * IDLE_S_MAX, 1.0)


def counters(world: Deployment) -> dict[str, int]:
    """What the router says it did."""
    assert world.router is not None
    return {name: int(world.router.metric(f"baton_router_{name}_total", KEY)) for name in COUNTERS}


@contextmanager
def soaked() -> Iterator[Soak]:
    """Prefill and decode instances of unlike layouts, on two hosts where this machine can have them."""
    with ExitStack() as stack:
        more, hosts = {}, None
        try:
            one, other = hosts = stack.enter_context(two_hosts())
            more = {"hosts": {"registry": one, "prefill": one, "decode": other, "router": other}}
        except NoHosts as reason:
            print(f"\none host, no cut networks: namespaces are not allowed here: {reason}")
        serve = {**SERVE, "transport": "tcp"} if hosts else SERVE
        made = deployment(["tp2", "pp2"], ["tp1", "pp2"], serve=serve, route=ROUTE, api_key=KEY, **more)
        world = stack.enter_context(made)
        seed = int(os.environ.get("BATON_LOAD_SEED", "0"))
        catalogue = Catalogue(seed=seed, model=world.model)
        load = Load(world.url, catalogue.question, num_clients=8, key=KEY, pause_s=0.1)
        if hosts:
            load.socket = stack.enter_context(other.relay(world.folder / "clients", world.url))
        yield Soak(world, FaultInjector(world, Random(seed), hosts), load)


def test_soak() -> None:
    with soaked() as soak:
        world, load = soak.world, soak.load
        assert any(each.verdict.fate is Fate.RIGHT for each in asyncio.run(soak.calm(LOAD_S / 10)))
        disturbances, kills = list(soak.injector.disturbances), list(soak.injector.kills)
        print(f"\nfaults: {', '.join([*disturbances, *kills])}")

        seen = asyncio.run(soak.disturbed(disturbances, LOAD_S * 0.4))
        soak.report()
        done = counters(world)
        print(done, *growth_lines(seen), sep="\n")
        assert not load.of(Fate.WRONG)
        assert soak.unexplained == []
        assert len(load.of(Fate.RIGHT)) > len(load.outcomes) / 2
        assert done["handoffs"] >= len(load.of(Fate.RIGHT)) * 0.9, "not everything was handed over"
        minutes = (seen[-1].at_s - seen[0].at_s) / 60
        steady = Bounds(process_bytes=max(GROWTH_MIN, int(GROWTH_PER_MIN * minutes)), num_fds=10)
        check_growth(lambda: growth([*seen, idle_snapshot(world)], steady))

        num_before = len(soak.injector.injected)
        asyncio.run(soak.disturbed(kills + disturbances, LOAD_S * 0.4))
        soak.report()
        assert not load.of(Fate.WRONG)
        assert soak.unexplained == []
        for fault in soak.injector.injected[num_before:]:
            check_kill(fault, [each for each in load.outcomes if fault.hits(each)])
        later = asyncio.run(soak.calm(max(CALM_S * 2, LOAD_S / 10)))
        assert [str(each) for each in later if each.verdict.fate in (*FAILURES, Fate.WRONG)] == []
        assert any(each.verdict.fate is Fate.RIGHT for each in later)
        check_left(world, seen[0])


def growth_lines(seen: list[Snapshot]) -> list[str]:
    """Memory of each process by the line through what was seen, and what it holds at the end."""
    minutes = (seen[-1].at_s - seen[0].at_s) / 60
    found = [f"memory over {minutes:.1f} minutes, {len(seen)} looks:"]
    for name in seen[0].held:
        points = [(each.at_s, each.held[name].memory_bytes) for each in seen if name in each.held]
        found.append(f"{name:<18} {slope_per_s(points) * 60 / 2**20:+.2f} MiB/min")
    return [*found, *seen[-1].lines()]


def check_kill(fault: Fault, hit: list[Outcome]) -> None:
    """What is promised where a process is killed."""
    if "killed" not in fault.name:
        return
    assert hit, f"{fault.name}: nothing was under way"
    failed = [each for each in hit if each.verdict.fate in FAILURES]
    late = [each for each in failed if fault.failed_after_s(each) > FAIL_S + SLACK_S]
    assert not late, f"{fault.name}: {late[0]} failed {fault.failed_after_s(late[0]):.1f} s after"
    if fault.name == "registry killed":
        assert not failed, f"hand-overs need no registry: {failed[0]}"
    if fault.name != "router killed":
        cut = [each for each in failed if each.verdict.fate is Fate.BROKEN]
        assert not cut, f"{fault.name}: the router is there, and yet {cut[0]}"


def check_left(world: Deployment, before: Snapshot) -> None:
    """Nobody is missing, nobody holds more than before, and no named segment of shared memory is left."""
    assert {part.name for part in world.parts if part.is_alive} == {part.name for part in world.parts}
    alike = Bounds(process_bytes=64 << 20, num_fds=10, num_segments=2, num_threads=12)

    def grown() -> list[str]:
        found = growth([before, idle_snapshot(world)], alike)
        return [line for line in found if not line.startswith("another process")]

    check_growth(grown)
    assert not snapshot(world).segments | before.segments, "named segments stay after a kill"


def test_a_failure_that_no_fault_explains_is_named() -> None:
    def outcome(begun_s: float, trouble: str = "reset") -> Outcome:
        reply = Reply(begun_s, trouble=trouble, ended_s=begun_s + 1.0)
        return Outcome(Question("text", COMPLETIONS, {}), reply, Verdict(Fate.BROKEN, trouble))

    with deployment(has_registry=False, router=False) as nobody:
        soak = Soak(nobody, FaultInjector(nobody, Random(0)), Load("", Catalogue().question))
        soak.injector.injected += [Fault("router killed", 10.0, 20.0), Fault("disk full", 30.0, 40.0)]
        soak.load.outcomes += [outcome(9.5), outcome(19.5)]
        assert soak.unexplained == []
        soak.load.outcomes += [outcome(8.0), outcome(35.0), outcome(15.0, "no end after 120 s")]
        assert len(soak.unexplained) == 3


def test_a_wrong_expectation_is_caught() -> None:
    catalogue = Catalogue(seed=1, bad_share=0.0, leave_share=0.0)

    def spoiled(chance: Random) -> Question:
        """Every fifth question expects what no model says."""
        question = catalogue.question(chance)
        if question.choices and chance.random() < 0.2:
            wrong = replace(question.choices[-1], text=question.choices[-1].text + "!")
            return replace(question, kind="spoiled", choices=(*question.choices[:-1], wrong))
        return question

    with deployment(["tp1"], ["pp2"], serve=SERVE) as world:
        catalogue.model = world.model
        load = Load(world.url, spoiled, num_clients=4)
        asyncio.run(Soak(world, FaultInjector(world, Random(0)), load).calm(5.0))
        asked = [outcome for outcome in load.outcomes if outcome.question.kind == "spoiled"]
        assert asked
        assert load.of(Fate.WRONG) == asked
