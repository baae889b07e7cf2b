"""Minutes of mixed load on unlike layouts behind the router: right answers or clean errors, and no growth.

BATON_LOAD_S says how long the load lasts (default 120 s). A quarter of it is warm-up; after that the
deployment is looked at while it is idle for a moment, several times, and once more at the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from time import monotonic

import pytest
from tests.serve.clients import Load
from tests.serve.deployment import Deployment, deployment, until
from tests.serve.judging import Fate
from tests.serve.questions import CONTEXT_MAX, Catalogue, Question
from tests.serve.resources import Snapshot, growth, lost_pages, server_pages, snapshot

from baton.serving.fleet import IDLE_S_MAX

LOAD_S = float(os.environ.get("BATON_LOAD_S", "120"))
NUM_LOOKS = 6
PAGES_S_MAX = 120.0
BUSY_SHARE_MAX = 0.05
ROUTE = {"local": "never"}
"""A tiny model prefills faster than it hands over: left to itself the router would hardly hand over."""
SERVE = {"pool-tokens": "8192", "context": str(CONTEXT_MAX), "chunk-tokens": "256", "queue": "64"}

pytestmark = pytest.mark.load


def idle_snapshot(world: Deployment) -> Snapshot:
    """Once nothing is under way and every page is free again."""
    until(lambda: not lost(world), lambda: f"pages return: {lost(world)}", PAGES_S_MAX)
    return snapshot(world)


def check_growth(found: Callable[[], list[str]]) -> None:
    """Nothing grew, once the router has closed the connections that the last requests left idle."""
    until(lambda: not found(), lambda: f"no growth, but {found()}", 2 * IDLE_S_MAX, 1.0)


def lost(world: Deployment) -> list[str]:
    """Instances that hold pages now."""
    return lost_pages({part.name: server_pages(world, part.name) for part in world.instances})


async def loaded(world: Deployment, load: Load, duration_s: float) -> None:
    """Runs the load for a time."""
    load.is_stopped = False
    running = asyncio.create_task(load.run())
    limit_s = monotonic() + duration_s
    while monotonic() < limit_s and not running.done():
        await asyncio.sleep(0.1)
        assert all(part.is_alive for part in world.parts), "a part ended"
    load.is_stopped = True
    await running


COUNTERS = ("hand_overs", "local_prefills", "retries", "resumes", "given_up", "disconnects")


def counters(world: Deployment) -> dict[str, int]:
    """What the router says it did."""
    assert world.router is not None
    return {name: int(world.router.metric(f"baton_router_{name}_total")) for name in COUNTERS}


def report(load: Load, duration_s: float) -> None:
    """Figures on stdout, which `make load` shows."""
    print(f"\n{len(load.outcomes)} requests in {duration_s:.0f} s: {load.tally()}")
    for outcome in load.of(Fate.WRONG, Fate.BROKEN, Fate.FAILED)[:10]:
        print(f"  {outcome}")


def test_mixed_load() -> None:
    catalogue = Catalogue(seed=int(os.environ.get("BATON_LOAD_SEED", "0")))
    with deployment(["tp2", "pp2"], ["tp1", "cp2:stripe32"], serve=SERVE, route=ROUTE) as world:
        catalogue.model = world.model
        load = Load(world.url, catalogue.question, num_clients=8, pause_s=0.1)
        asyncio.run(loaded(world, load, LOAD_S / 4))
        seen = [idle_snapshot(world)]
        for _ in range(NUM_LOOKS):
            asyncio.run(loaded(world, load, LOAD_S * 3 / 4 / NUM_LOOKS))
            seen.append(idle_snapshot(world))
        report(load, LOAD_S)
        done = counters(world)
        print(done)
        print("\n".join(["before:", *seen[0].lines(), "after:", *seen[-1].lines()]))
        assert not load.of(Fate.WRONG, Fate.BROKEN, Fate.FAILED)
        assert len(load.of(Fate.BUSY)) <= BUSY_SHARE_MAX * len(load.outcomes)
        assert len(load.of(Fate.RIGHT)) > len(load.outcomes) / 2
        assert done["hand_overs"] >= len(load.of(Fate.RIGHT)) * 0.9, "not everything was handed over"
        check_growth(lambda: growth([*seen, idle_snapshot(world)]))
        assert seen[-1].segments <= seen[0].segments, "named segments of shared memory were left"


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
        asyncio.run(loaded(world, load, 5.0))
        report(load, 5.0)
        asked = [outcome for outcome in load.outcomes if outcome.question.kind == "spoiled"]
        assert asked
        assert load.of(Fate.WRONG) == asked
