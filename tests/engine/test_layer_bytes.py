"""What each layer of a rank has to hand over, and that cuts follow it."""

import numpy as np

from baton.engine.rank.cutting import Cuts
from baton.engine.rank.layer_bytes import LayerBytes
from baton.engine.rank.pace import Pace, Took
from baton.plan import Spec, Storage, parse_layout
from baton.plan.cache import Cache, Units
from baton.plan.kinds import Conv, Paged, Recurrent
from baton.plan.models.parts import ModelPart, stack

KEY = 2 * 3 * 4 * 4
"""Bytes of a token in a full layer: k and v of 3 heads of 4 channels."""
STATE = 6 * 10 * 4 + 6 * 5 * 3 * 4


def cache() -> Cache:
    """Layers 0 and 3 attend, the first with a window of 8; 1 and 2 recur."""
    recurrent = Recurrent(6, 10, (Conv("x", Units(6), 5, 3),))
    kinds = ((Paged(3, 4, window=8), ((0, 1),)), (recurrent, ((1, 3),)), (Paged(3, 4), ((3, 4),)))
    return stack((ModelPart(4, kinds),))


def of_rank(layout: str, rank: int, layers: tuple[int, int]) -> LayerBytes:
    spec = Spec(parse_layout(layout), cache(), Storage(page_tokens=4, dtype="fp32"))
    return LayerBytes.of_rank(spec, rank, layers)


def test_a_state_counts_once_and_a_window_in_part() -> None:
    whole = of_rank("tp1", 0, (0, 4))
    assert whole.of_tokens(20, (0, 10)).tolist() == [0, 0, 0, 10 * KEY]
    assert whole.of_tokens(20, (10, 15)).tolist() == [3 * KEY, 0, 0, 5 * KEY]
    assert whole.of_tokens(20, (15, 20)).tolist() == [5 * KEY, STATE, STATE, 5 * KEY]


def test_states_are_told_apart_and_so_are_layers() -> None:
    whole = of_rank("tp1", 0, (0, 4))
    assert whole.of_states(20, (0, 19)).tolist() == [0, 0, 0, 0]
    assert whole.of_states(20, (19, 20)).tolist() == [0, STATE, STATE, 0]
    assert whole.kinds == (0, 1, 1, 2)
    assert not whole.is_alike
    assert of_rank("pp4", 1, (1, 2)).is_alike


def test_a_rank_counts_its_own_layers_and_units() -> None:
    assert of_rank("pp2", 1, (2, 4)).of_tokens(5, (0, 5)).tolist() == [STATE, 5 * KEY]
    assert of_rank("tp3", 1, (0, 4)).of_tokens(5, (0, 5)).tolist() == [
        5 * KEY // 3,
        STATE // 3,
        STATE // 3,
        5 * KEY // 3,
    ]


def test_cuts_follow_the_layers_that_have_something() -> None:
    """All bytes lie in layer 3 of 8: it leaves by itself, and the layers after it are one group."""
    pace = Pace()
    pace.computed(512, Took(1e-3, 0.0))
    heavy = [0, 0, 0, 10**7, 0, 0, 0, 0]

    groups = Cuts().of("cost", pace.times(8, 512, {1: np.array(heavy)}), 512, pace.compute(512))
    assert groups[0] == (0, 4)
    even = Cuts().of("cost", pace.times(8, 512, {1: sum(heavy) // 8}), 512, pace.compute(512))
    assert groups != even
