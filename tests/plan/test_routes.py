"""Mirrors share the load: every turn once, every source the same, few routes."""

from __future__ import annotations

from fractions import Fraction
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.world import make_cache

from baton.plan.kinds import Latent, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.routes import Prompt, deal, resolve
from baton.plan.storage import Storage


@given(st.integers(1, 40), st.integers(1, 40))
def test_deal(num_sources: int, num_targets: int) -> None:
    matches = deal(num_sources, num_targets)
    loads = dict.fromkeys(range(num_sources), Fraction(0))
    turns: dict[int, list[int]] = {target: [] for target in range(num_targets)}
    for match in matches:
        period = match.turns.period
        assert period == num_sources // gcd(num_sources, num_targets)
        turns[match.target] += range(match.turns.lo, match.turns.hi)
        loads[match.source] += Fraction(match.turns.hi - match.turns.lo, period)
    assert all(
        sorted(found) == list(range(num_sources // gcd(num_sources, num_targets))) for found in turns.values()
    )
    assert set(loads.values()) == {Fraction(num_targets, num_sources)}
    common = gcd(num_sources, num_targets)
    assert len(matches) == num_sources + num_targets - common


@pytest.mark.parametrize(
    ("source", "target"), [("tp8", "tp3"), ("tp5", "tp8"), ("cp3:mirror.tp2", "tp4"), ("tp6", "cp2.tp4")]
)
def test_loads_differ_by_no_more_than_the_last_pages(source: str, target: str) -> None:
    cache = make_cache(1, (Latent(8), ((0, 1),)))
    made = plan(*(Spec(parse_layout(text), cache, Storage(16)) for text in (source, target)))
    for offset in range(5):
        loads = dict.fromkeys(range(made.source.layout.num_ranks), 0)
        for route in resolve(made, Prompt(16 * 999 + 3, offset=offset)):
            loads[route.source] += route.num_bytes
        assert max(loads.values()) - min(loads.values()) <= 0.02 * max(loads.values())


def test_every_chunk_and_with_the_offset_every_short_prompt_uses_all_mirrors() -> None:
    cache = make_cache(1, (Latent(8), ((0, 1),)))
    made = plan(*(Spec(parse_layout(text), cache, Storage(16)) for text in ("tp4", "tp1")))
    used = [{route.source for route in resolve(made, Prompt(10, offset=offset))} for offset in range(4)]
    assert [len(sources) for sources in used] == [1, 1, 1, 1]
    assert set.union(*used) == {0, 1, 2, 3}


def test_state_is_dealt_by_layers() -> None:
    cache = make_cache(6, (Recurrent(1, 8), ((0, 6),)))
    made = plan(*(Spec(parse_layout(text), cache, Storage(16)) for text in ("tp3", "tp1")))
    assert [(r.source, r.layers) for r in resolve(made, Prompt(10))] == [
        (0, ((0, 1), (3, 4))),
        (1, ((1, 2), (4, 5))),
        (2, ((2, 3), (5, 6))),
    ]
