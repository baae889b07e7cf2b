"""Periodic token sets against sets of integers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.plan.ranges import Stride
from baton.plan.tokens import can_meet, count_below, runs, set_runs, token_set


@st.composite
def strides(draw) -> Stride:
    start = draw(st.integers(0, 30))
    period = draw(st.integers(1, 12))
    stop = draw(st.integers(start, 90))
    return Stride(start, stop, draw(st.integers(0, 20)), draw(st.integers(1, period)), period)


def members(stride: Stride) -> set[int]:
    return {t for t in range(stride.start, stride.stop) if (t - stride.phase) % stride.period < stride.block}


def spelt(items) -> list[int]:
    found = []
    for start, stop, *rest in items:
        block, period = rest or (1, 1)
        found += [t for t in range(start, stop) if (t - start) % period < block]
    return found


@given(st.lists(strides(), min_size=1, max_size=4))
def test_common_tokens(parts: list[Stride]) -> None:
    wanted = set.intersection(*map(members, parts))
    found = runs(parts)
    pairs = list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))
    assert [t for a, b in pairs for t in range(a, b)] == sorted(wanted)
    assert all(a < b for a, b in pairs)
    assert all(b < c for (_, b), (c, _) in pairwise(pairs)), "runs that touch are one run"
    items = token_set(parts)
    listed = spelt(items)
    assert sorted(listed) == sorted(wanted), "each token once"
    assert list(items) == sorted(items)
    assert all(set(spelt([item])) for item in items), "no empty item"
    if items:
        again = set_runs(items)
        assert again.num_tokens == len(wanted)


@given(strides())
def test_slots_count_the_members_before(stride: Stride) -> None:
    inside = sorted(members(stride))
    assert count_below(stride, np.array(inside, dtype=np.int64)).tolist() == list(range(len(inside)))
    for token in range(stride.start, stride.stop + 1):
        assert stride.num_below(token) == sum(t < token for t in inside)


@given(strides(), strides())
def test_can_meet_is_exact_for_long_prompts(left: Stride, right: Stride) -> None:
    far = 12 * 11 * 10 * 9
    a = Stride(0, far, left.phase, left.block, left.period)
    b = Stride(0, far, right.phase, right.block, right.period)
    assert can_meet(a, b) == bool(members(a) & members(b))


def test_short_forms() -> None:
    assert token_set([Stride(0, 200), Stride(0, 200, 64, 64, 128)]) == ((64, 200, 64, 128),)
    assert token_set([Stride(0, 100), Stride(0, 100, 64, 64, 128)]) == ((64, 100),)
    assert token_set([Stride(70, 400), Stride(0, 400, 64, 64, 128)]) == ((70, 128), (192, 400, 64, 128))
    assert token_set([Stride(5, 5)]) == ()
