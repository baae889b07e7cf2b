"""The bound of a hand-over: layers weigh what they have to send, when they can."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton.engine.commands import CopyRecord, LayerReady
from baton.engine.trace import HandoffTrace, RequestTrace, across_s


def told(dues: dict[int, list[LayerReady]], prompt_s: float) -> HandoffTrace:
    """Computed from 10 on."""
    copies = {rank: [CopyRecord(0, 0, 0, 10.0, 20.0, found)] for rank, found in dues.items()}
    source = RequestTrace(9.0, begun_s=10.0, prompt_s=prompt_s, copies=copies)
    return HandoffTrace(9.0, prompt_s, source, RequestTrace(9.0))


def hybrid() -> HandoffTrace:
    """Two chunks of 2 s; layers 0 and 2 of 4 keep 100 bytes of each, the others a state of 300."""
    steps = [
        LayerReady(10.5, 100),
        LayerReady(11.5, 100),
        LayerReady(12.5, 100),
        LayerReady(13.0, 300, 300),
        LayerReady(13.5, 100),
    ]
    return told({0: [*steps, LayerReady(14.0, 300, 300)]}, 14.0)


def evenly(found: HandoffTrace, serial_s: float) -> float:
    """The bound of one who takes all layers of all chunks for alike."""
    ends = [10.0 + 0.5 * (index + 1) for index in range(8)]
    last_s = across_s([(end_s, 1) for end_s in ends], serial_s / len(ends), 10.0)
    return 1 - (last_s - found.prefill.prompt_s) / serial_s


def test_states_weigh_in_the_last_chunk_alone() -> None:
    found = hybrid()
    # 10 ms a byte: done at 11.5, 12.5, 13.5, then 13.5 + 3, 16.5 + 1 and 17.5 + 3.
    assert found.least_exposed_s({0: 10.0}) == pytest.approx(6.5)
    assert found.bound({0: 10.0}) == pytest.approx(0.35)
    # 1 ms a byte: only the last layer is left when compute ends.
    assert found.least_exposed_s({0: 1.0}) == pytest.approx(0.3)
    assert found.bound({0: 1.0}) == pytest.approx(0.7)
    assert found.state_share() == pytest.approx(0.6)


def test_without_states_only_tokens_are_exposed() -> None:
    # Tokens alone are done at 11.5, 12.5, 13.5 and 14.5, or as they come.
    assert hybrid().least_exposed_s({0: 10.0}, has_states=False) == pytest.approx(0.5)
    assert hybrid().least_exposed_s({0: 1.0}, has_states=False) == 0.0


def test_layers_that_are_taken_for_alike_are_seen() -> None:
    for serial_s in (1.0, 2.0, 4.0):
        assert abs(hybrid().bound({0: serial_s}) - evenly(hybrid(), serial_s)) > 0.05


def test_a_window_weighs_what_it_holds() -> None:
    """The full layer is the last one, and most of it all: nobody could hide it."""
    windowed = told({0: [LayerReady(11.0, 100), LayerReady(12.0, 100), LayerReady(13.0, 800)]}, 13.0)
    assert windowed.bound({0: 1.0}) == pytest.approx(0.2)


def old_bound(ends: Sequence[float], prompt_s: float, serial_s: float) -> float:
    """Every layer takes as much of the link as every other."""
    finish_s = 0.0
    for ready_s in ends:
        finish_s = max(finish_s, ready_s) + serial_s / len(ends)
    return 1 - (max(prompt_s, finish_s) - prompt_s) / serial_s


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_are_alike_weigh_alike(seed: int) -> None:
    rng = random.Random(seed)
    ends = sorted(rng.uniform(10.0, 12.0) for _ in range(rng.randrange(1, 40)))
    found = told({0: [LayerReady(ready_s, 4096) for ready_s in ends]}, ends[-1])
    serial_s = rng.uniform(0.1, 5.0)
    assert found.bound({0: serial_s}) == pytest.approx(old_bound(ends, ends[-1], serial_s))


def test_the_slowest_rank_decides_and_is_held_to_the_busiest() -> None:
    found = told({0: [LayerReady(11.0, 10)], 1: [LayerReady(11.5, 10)]}, 12.0)
    assert found.bound({0: 2.0, 1: 1.0}) == pytest.approx(0.5)
    assert found.bound({0: 0.5, 1: 2.0}) == pytest.approx(0.25)
    assert found.bound({}) == 1.0


def test_cached_tokens_leave_from_the_beginning() -> None:
    cached = told({0: [LayerReady(0.0, 500), LayerReady(12.0, 500)]}, 12.0)
    assert cached.least_exposed_s({0: 6.0}) == pytest.approx(10.0 + 3.0 + 3.0 - 12.0)
    assert cached.least_exposed_s({0: 2.0}) == pytest.approx(1.0)
