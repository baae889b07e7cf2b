"""Mappings worked out by hand from another system's semantics, and its known mistakes."""

from __future__ import annotations

from itertools import product

import pytest
from tests.plan.world import make_cache

from baton.plan.cache import Cache, Units
from baton.plan.checker import check
from baton.plan.kinds import Conv, Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.routes import BoundRoute, Prompt, resolve
from baton.plan.storage import Storage


def routes(cache: Cache, source: str, target: str, tokens: int = 64, **held: int) -> tuple[BoundRoute, ...]:
    specs = [Spec(parse_layout(layout), cache, Storage()) for layout in (source, target)]
    prompt = Prompt(tokens, held)
    found = plan(*specs)
    bound = resolve(found, prompt)
    check(found, prompt, bound)
    return bound


def heads(cache: Cache, source: str, target: str) -> dict[int, dict[int, list[int]]]:
    """target rank -> source rank -> heads of k."""
    found: dict[int, dict[int, list[int]]] = {}
    for route in routes(cache, source, target):
        if route.component == "k":
            found.setdefault(route.target, {})[route.source] = list(range(*route.units))
    return found


def gqa(num_heads: int, num_layers: int = 1) -> Cache:
    return make_cache(num_layers, (Paged(num_heads, 4), ((0, num_layers),)))


def mla(num_layers: int = 1) -> Cache:
    return make_cache(num_layers, (Latent(8), ((0, num_layers),)))


def test_a1_gqa_gathers_heads() -> None:
    assert heads(gqa(8), "tp4", "tp2") == {0: {0: [0, 1], 1: [2, 3]}, 1: {2: [4, 5], 3: [6, 7]}}


def test_a2_gqa_spreads_heads() -> None:
    assert heads(gqa(8), "tp2", "tp4") == {0: {0: [0, 1]}, 1: {0: [2, 3]}, 2: {1: [4, 5]}, 3: {1: [6, 7]}}


def test_a3_mirrored_heads_are_sent_once_half_from_each() -> None:
    found = [r for r in routes(gqa(2), "tp4", "tp1", 256) if r.component == "k"]
    assert [(r.source, r.units, r.tokens) for r in found] == [
        (0, (0, 1), ((0, 256, 64, 128),)),
        (1, (0, 1), ((64, 256, 64, 128),)),
        (2, (1, 2), ((0, 256, 64, 128),)),
        (3, (1, 2), ((64, 256, 64, 128),)),
    ]


def test_a4_heads_are_mirrored_on_neighbouring_targets() -> None:
    assert heads(gqa(2), "tp1", "tp4") == {0: {0: [0]}, 1: {0: [0]}, 2: {0: [1]}, 3: {0: [1]}}


def test_a5_neither_size_divides_the_other() -> None:
    assert heads(gqa(12), "tp6", "tp4") == {
        0: {0: [0, 1], 1: [2]},
        1: {1: [3], 2: [4, 5]},
        2: {3: [6, 7], 4: [8]},
        3: {4: [9], 5: [10, 11]},
    }


def test_a6_latent_uses_every_mirror() -> None:
    found = routes(mla(), "tp8", "tp2", 64 * 16)
    assert {(r.target, r.source) for r in found} == {(0, s) for s in range(4)} | {(1, s) for s in range(4, 8)}
    assert len({r.num_bytes for r in found}) == 1


def test_a7_latent_fans_out() -> None:
    found = routes(mla(), "tp2", "tp8", 1000)
    assert {r.target: r.source for r in found} == {t: t // 4 for t in range(8)}
    assert len(found) == 8


def test_latent_equal_sizes_use_one_route_each() -> None:
    found = routes(mla(), "tp8", "tp8", 1000)
    assert [(r.source, r.target) for r in found] == [(i, i) for i in range(8)]


def test_latent_onto_one_rank_takes_an_eighth_from_each() -> None:
    found = routes(mla(3), "tp8", "tp1", 64 * 32)
    assert [(r.source, r.tokens) for r in found] == [(s, ((64 * s, 2048, 64, 512),)) for s in range(8)]


@pytest.mark.parametrize("component", ["k", "v"])
def test_a8_uneven_stages_keep_their_layers(component: str) -> None:
    found = {r.source: r.layers for r in routes(gqa(2, 94), "pp4", "pp1") if r.component == component}
    assert found == {0: ((0, 23),), 1: ((23, 46),), 2: ((46, 70),), 3: ((70, 94),)}


def test_a9_stages_m_to_n() -> None:
    found = {(r.source, r.target): r.layers for r in routes(gqa(2, 48), "pp3", "pp2") if r.component == "v"}
    assert found == {(0, 0): ((0, 16),), (1, 0): ((16, 24),), (1, 1): ((24, 32),), (2, 1): ((32, 48),)}
    halves = {(r.source, r.target): r.layers for r in routes(gqa(2, 16), "pp4", "pp2") if r.component == "k"}
    assert halves == {(0, 0): ((0, 4),), (1, 0): ((4, 8),), (2, 1): ((8, 12),), (3, 1): ((12, 16),)}


def test_a10_split_pages_are_contiguous() -> None:
    found = routes(mla(), "cp4:split", "tp1", 640)
    assert [(r.source, r.tokens) for r in found] == [
        (0, ((0, 192),)),
        (1, ((192, 384),)),
        (2, ((384, 512),)),
        (3, ((512, 640),)),
    ]
    mirrored = routes(mla(), "cp4:mirror", "tp1", 640)
    assert [r.num_bytes // (8 * 2 * 64) for r in mirrored] == [3, 3, 2, 2]


def test_a11_decode_context_parallel_takes_every_fourth_token() -> None:
    found = routes(mla(), "tp1", "cp4:stripe1", 1000)
    assert [(r.target, r.tokens) for r in found] == [(i, ((i, 1000, 1, 4),)) for i in range(4)]


def test_a12_packed_convolution_parts_keep_their_own_units() -> None:
    convs = tuple(
        Conv(part, Units(count, "key head"), 4, 3) for part, count in (("q", 4), ("k", 4), ("v", 8))
    )
    cache = make_cache(1, (Recurrent(8, 16, convs), ((0, 1),)))
    found = {(r.component, r.target, r.source): r.units for r in routes(cache, "tp4", "tp2")}
    for part in ("conv.q", "conv.k"):
        assert [found[part, s // 2, s] for s in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    for part in ("conv.v", "ssm"):
        assert [found[part, s // 2, s] for s in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize(("held", "start"), [(0, 872), (896, 896)])
def test_a13_only_the_window_travels(held: int, start: int) -> None:
    cache = make_cache(2, (Paged(2, 4), ((0, 1),)), (Paged(2, 4, window=128), ((1, 2),)))
    found = routes(cache, "tp2", "tp1", 1000, **({"tokens.w128": held} if held else {}))
    assert {r.tokens for r in found if r.component == "k.w128"} == {((start, 1000),)}
    assert {r.tokens for r in found if r.component == "k"} == {((0, 1000),)}


def owned(num_heads: int, num_ranks: int, rank: int) -> set[int]:
    """Ownership as that system defines it."""
    if num_heads >= num_ranks:
        each = num_heads // num_ranks
        return set(range(rank * each, (rank + 1) * each))
    return {rank // (num_ranks // num_heads)}


HEADS = (1, 2, 4, 6, 8, 12, 16, 24, 48)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


def legal_pairs() -> list[tuple[int, int, int]]:
    fits = {h: [n for n in SIZES if h % n == 0 or n % h == 0] for h in HEADS}
    return [(h, p, d) for h in HEADS for p, d in product(fits[h], fits[h])]


def test_every_legal_pair_of_tp_sizes_is_right() -> None:
    pairs = legal_pairs()
    assert sum(p != d for _, p, d in pairs) == 316
    for num_heads, p, d in pairs:
        got: dict[int, list[tuple[int, int]]] = {}
        for target, sources in heads(gqa(num_heads), f"tp{p}", f"tp{d}").items():
            for source, found in sources.items():
                assert set(found) <= owned(num_heads, p, source), (num_heads, p, d)
                got.setdefault(target, []).extend((head, source) for head in found)
        for target in range(d):
            names = [head for head, _ in got[target]]
            assert set(names) == owned(num_heads, d, target), (num_heads, p, d)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (94, 4, (23, 23, 24, 24)),
        (61, 2, (30, 31)),
        (62, 4, (15, 15, 16, 16)),
        (46, 4, (11, 11, 12, 12)),
        (30, 4, (7, 7, 8, 8)),
        (80, 4, (20, 20, 20, 20)),
    ],
)
def test_uneven_stages(num_layers: int, num_stages: int, sizes: tuple[int, ...]) -> None:
    stages = parse_layout(f"pp{num_stages}").stages(num_layers, "source")
    assert tuple(stop - start for start, stop in stages) == sizes
    for component in ("k", "v"):
        found = {
            r.source: r.layers
            for r in routes(gqa(2, num_layers), f"pp{num_stages}", "tp1")
            if r.component == component
        }
        assert found == {i: (stage,) for i, stage in enumerate(stages)}
