"""Whatever happens, in whatever order: every batch finds the right content, and everything ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.engine.scheduler import moves
from tests.engine.scheduler.world import World

NUM_WALKS = 4
NUM_MOVES = 60


class Calling(RuleBasedStateMachine):
    """Random calls of everybody who may call a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(data=st.data(), layout=st.sampled_from(moves.LAYOUTS))
    def begin(self, data: st.DataObject, layout: str) -> None:
        self.world = World(moves.make_setting(layout, picking(data)))

    @rule(data=st.data(), move=st.sampled_from([moves.add_local, moves.add_source, moves.reserve]))
    def come(self, data: st.DataObject, move: moves.Move) -> None:
        move(self.world, picking(data))

    @rule(data=st.data(), move=st.sampled_from([moves.schedule, moves.schedule, moves.run]))
    def compute(self, data: st.DataObject, move: moves.Move) -> None:
        move(self.world, picking(data))

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        moves.complete(self.world, picking(data))

    @rule(data=st.data(), move=st.sampled_from([moves.admit, moves.grant, moves.release]))
    def hand_off(self, data: st.DataObject, move: moves.Move) -> None:
        move(self.world, picking(data))

    @rule(data=st.data(), move=st.sampled_from([moves.abort, moves.disturb]))
    def give_up(self, data: st.DataObject, move: moves.Move) -> None:
        move(self.world, picking(data))

    @invariant()
    def is_accounted_for(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.settle()


def picking(data: st.DataObject) -> moves.Pick:
    return lambda count: data.draw(st.integers(0, count - 1))


TestCalling = Calling.TestCase
TestCalling.settings = settings(max_examples=max(1, settings().max_examples // 8), stateful_step_count=40)


@pytest.mark.parametrize("layout", moves.LAYOUTS)
def test_random_walks(layout: str) -> None:
    for seed in range(NUM_WALKS):
        moves.walk(seed, NUM_MOVES, layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", moves.LAYOUTS)
def test_many_walks_meet_every_case(layout: str) -> None:
    seen = Counter[str]()
    for seed in range(40 * NUM_WALKS):
        seen += moves.walk(seed, NUM_MOVES, layout).seen
    wanted = {"preempted", "forks", "copies"}
    if not layout.endswith("split"):
        wanted |= {"hits", "held"}
    assert wanted <= set(seen), f"the walks met {dict(seen)} only"
