"""Memory that an engine has already: placements from tensors, what they move, and what is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, LayoutError
from baton.plan import DeclaredPlacement, Spec, Storage, TensorView, declare, declared, parse_layout, plan
from baton.plan.binding import bind
from baton.plan.cache import Cache, Component, Dim, Full, State, Units, Window
from baton.plan.chunks import Tables
from baton.plan.content import allocate, execute
from baton.plan.declared import OverlapCheck, PlacedRegion
from baton.plan.ownership import buffers, page_spaces, placements
from baton.plan.routes import Chunk, Prompt
from baton.plan.wire import spec_from_bytes, spec_to_bytes

LAYERS, PAGES, HEADS, TOKENS, CHANNELS = 3, 6, 2, 4, 5


def component(name: str, **changes: Any) -> Component:
    made = Component(name, ((0, LAYERS),), Units(HEADS), (Dim("channel", CHANNELS),), Full(), "tokens", "kv")
    return replace(made, **changes)


def spec_of(*components: Component, layout: str = "tp1", **changes: Any) -> Spec:
    storage = Storage(page_tokens=TOKENS, dtype="fp32", num_pages_default=PAGES, **changes)
    cache = Cache(LAYERS, tuple(sorted(components, key=lambda part: part.name)))
    return Spec(parse_layout(layout), cache, storage)


def with_placements(spec: Spec, *declared: DeclaredPlacement) -> Spec:
    return replace(spec, storage=spec.storage.with_placements(declared))


# Tensors of an engine, as (component, axes, views), each a slice of one storage.


def one_per_layer(raw: torch.Tensor) -> list:
    """vLLM's LBHNC: layer after layer."""
    whole = raw[: LAYERS * PAGES * HEADS * TOKENS * CHANNELS]
    tensors = list(whole.view(LAYERS, PAGES, HEADS, TOKENS, CHANNELS))
    return [("k", ("page", "unit", "token", "channel"), tensors)]


def across_layers(raw: torch.Tensor) -> list:
    """BLNHC: a block holds all layers, tokens outside of heads."""
    shape = (PAGES, LAYERS, TOKENS, HEADS, CHANNELS)
    whole = raw[7 : 7 + LAYERS * PAGES * HEADS * TOKENS * CHANNELS].view(shape)
    return [("k", ("page", "token", "unit", "channel"), list(whole.unbind(1)))]


def permuted(raw: torch.Tensor) -> list:
    """A view whose axes are not in the order of memory, with one axis for layers."""
    shape = (PAGES, LAYERS, TOKENS, HEADS, CHANNELS)
    whole = raw[: LAYERS * PAGES * HEADS * TOKENS * CHANNELS].view(shape).permute(1, 0, 3, 2, 4)
    return [("k", ("layer", "page", "unit", "token", "channel"), [whole])]


def in_another_order(raw: torch.Tensor) -> list:
    """Layers in the order in which they were registered, at unlike distances."""
    size = PAGES * HEADS * TOKENS * CHANNELS
    starts = [2 * size + 3, 0, size + 1]
    tensors = [raw[at : at + size].view(PAGES, HEADS, TOKENS, CHANNELS) for at in starts]
    return [("k", ("page", "unit", "token", "channel"), tensors)]


def kv_apart(raw: torch.Tensor) -> list:
    """(2, blocks, ...) for each layer: K and V by turns."""
    shape = (LAYERS, 2, PAGES, TOKENS, HEADS, CHANNELS)
    whole = raw[: 2 * LAYERS * PAGES * HEADS * TOKENS * CHANNELS].view(shape)
    return [(name, ("page", "token", "unit", "channel"), list(whole[:, i])) for i, name in enumerate("kv")]


def kv_in_a_page(raw: torch.Tensor) -> list:
    """(blocks, heads, tokens, K beside V): two components in each row, and spare bytes after each page."""
    row, page = 2 * CHANNELS, 2 * CHANNELS * TOKENS * HEADS + 3
    shape = (LAYERS, PAGES, HEADS, TOKENS, CHANNELS)
    strides = (PAGES * page, page, TOKENS * row, row, 1)
    return [
        (name, ("page", "unit", "token", "channel"), list(raw.as_strided(shape, strides, i * CHANNELS)))
        for i, name in enumerate("kv")
    ]


ENGINES = [one_per_layer, across_layers, permuted, in_another_order, kv_apart, kv_in_a_page]


def declared_by(engine, spec: Spec, raw: torch.Tensor, **where: Any) -> list[DeclaredPlacement]:
    return [
        declare(
            spec,
            name,
            axes,
            [TensorView.of(tensor) for tensor in tensors],
            buffer="raw",
            buffer_bytes=raw.nbytes,
            **where,
        )
        for name, axes, tensors in engine(raw)
        if name in spec.cache.by_name
    ]


def canonical(axes, tensors) -> torch.Tensor:
    """(layer, page, unit, token, channel)."""
    whole = tensors[0] if "layer" in axes else torch.stack(tensors)
    names = list(axes) if "layer" in axes else ["layer", *axes]
    return whole.permute([names.index(axis) for axis in ("layer", "page", "unit", "token", "channel")])


@pytest.mark.parametrize(("given_by", "taken_by"), list(itertools.product(ENGINES, ENGINES)))
def test_tokens_arrive_where_the_tensors_have_them(given_by, taken_by) -> None:
    """What is written through the tensors of one engine is read through those of another."""
    raws = [torch.full((2048,), -1.0) for _ in range(2)]
    names = {name for name, _, _ in given_by(raws[0])} & {name for name, _, _ in taken_by(raws[1])}
    specs = []
    for engine, raw in ((given_by, raws[0]), (taken_by, raws[1])):
        spec = spec_of(*(component(name) for name in sorted(names)))
        declared = declared_by(engine, spec, raw)
        specs.append(with_placements(spec, *declared))
    for name, _, tensors in given_by(raws[0]):
        for i, tensor in enumerate(tensors):
            seed = 1000 * (name == "v") + 100 * i
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 997 + seed)
    made, num_tokens = plan(*specs), 4 * TOKENS - 1
    pages = [torch.tensor([4, 1, 5, 2]), torch.tensor([0, 3, 1, 2])]
    tables = Tables(*({0: {"tokens": ids.numpy()}} for ids in pages))
    steps = bind(made, Prompt(num_tokens), tables, Chunk((0, LAYERS), (0, num_tokens)))
    before = raws[1].clone()
    execute(steps, *({(0, "raw"): raw.numpy().view(np.uint8)} for raw in raws))
    kept = torch.ones_like(before, dtype=torch.bool)
    for name in names:
        given_here, taken_here = (
            next((axes, tensors) for part, axes, tensors in engine(raw) if part == name)
            for engine, raw in ((given_by, raws[0]), (taken_by, raws[1]))
        )
        source, target = canonical(*given_here)[:, pages[0]], canonical(*taken_here)[:, pages[1]]
        rows = [whole.transpose(2, 3).reshape(LAYERS, -1, HEADS, CHANNELS) for whole in (source, target)]
        assert torch.equal(rows[0][:, :num_tokens], rows[1][:, :num_tokens])
        marks = torch.zeros_like(before, dtype=torch.bool)
        for part, _, tensors in taken_by(marks):
            for tensor in tensors if part == name else ():
                tensor[:] = True
        kept &= ~marks
    assert torch.equal(raws[1][kept], before[kept]), "nothing outside of the tensors is touched"


def test_equal_steps_between_layers_become_a_stride() -> None:
    spec, raw = spec_of(component("k")), torch.zeros(2048)
    page = 4 * HEADS * TOKENS * CHANNELS
    (even,) = declared_by(one_per_layer, spec, raw)
    assert dict(even.strides)["layer"] == PAGES * page
    assert even.layer_offsets == ()
    (uneven,) = declared_by(in_another_order, spec, raw)
    assert "layer" not in dict(uneven.strides)
    assert uneven.layer_offsets == (2 * PAGES * page + 12, 0, PAGES * page + 4)


def test_stages_and_tp_coordinates_have_memory_of_their_own() -> None:
    spec = spec_of(component("k", units=Units(3)), layout="pp2.tp2")
    declared, sizes = [], {}
    for stage, tp in itertools.product(range(2), range(2)):
        num_layers, num_heads = stage + 1, 2 - tp
        raw = torch.zeros(num_layers, PAGES, num_heads, TOKENS, CHANNELS)
        views = [TensorView.of(tensor) for tensor in raw]
        name, axes = f"raw{stage}{tp}", ("page", "unit", "token", "channel")
        where = {"buffer": name, "buffer_bytes": raw.nbytes, "stage": stage, "tp": tp}
        declared.append(declare(spec, "k", axes, views, **where))
        sizes[2 * stage + tp] = {name: raw.nbytes}
    spec = with_placements(spec, *declared)
    assert {rank: buffers(spec, rank, "pool") for rank in range(4)} == sizes
    assert spec_from_bytes(spec_to_bytes(spec)) == spec
    with pytest.raises(ConfigError, match="no placement of k on stage 1, tp 1"):
        placements(with_placements(spec, *declared[:3]), 0, "pool")


def test_opaque_pages_are_one_piece_for_each_unit_or_one_in_all() -> None:
    spec = spec_of(component("k"), granule=TOKENS)
    raw = torch.zeros(LAYERS, PAGES, HEADS, TOKENS, CHANNELS)
    views, where = [TensorView.of(tensor) for tensor in raw], {"buffer": "raw", "buffer_bytes": raw.nbytes}
    named = declare(spec, "k", ("page", "unit", "token", "channel"), views, **where)
    opaque, whole = (declare(spec, "k", axes, views, **where) for axes in (("page", "unit"), ("page",)))
    by_head, at_all = (placements(with_placements(spec, at), 0, "pool")["k"] for at in (opaque, whole))
    assert by_head == placements(with_placements(spec, named), 0, "pool")["k"]
    assert (at_all.stride("unit"), at_all.stride("token")) == (4 * CHANNELS, 4 * CHANNELS * HEADS)
    coarse = spec_of(component("k"), granule=TOKENS // 2)
    with pytest.raises(ConfigError, match=f"opaque.*granule of {TOKENS} tokens, the page, instead of 2"):
        placements(with_placements(coarse, opaque), 0, "pool")


def test_heads_of_opaque_pages_are_cut_for_tp() -> None:
    spec = spec_of(component("k"), granule=TOKENS)
    raw = torch.arange(LAYERS * PAGES * HEADS * TOKENS * CHANNELS, dtype=torch.float32)
    tensors = raw.view(LAYERS, PAGES, HEADS, TOKENS, CHANNELS)
    at = declare(
        spec,
        "k",
        ("page", "unit"),
        [TensorView.of(t) for t in tensors],
        buffer="raw",
        buffer_bytes=raw.nbytes,
    )
    source, target = with_placements(spec, at), spec_of(component("k"), layout="tp2", granule=TOKENS)
    made, memory = plan(source, target), allocate(target, 0, "target")
    ids = np.array([2, 5, 0])
    tables = Tables({0: {"tokens": ids}}, {rank: {"tokens": np.array([1, 0, 3])} for rank in range(2)})
    prompt = Prompt(2 * TOKENS + 1)
    execute(
        bind(made, prompt, tables, Chunk((0, LAYERS), (0, prompt.num_tokens))),
        {(0, "raw"): raw.numpy().view(np.uint8)},
        memory,
    )
    for head in range(2):
        pool = memory[head, "k"].view(np.float32).reshape(LAYERS, PAGES, TOKENS, CHANNELS)
        np.testing.assert_array_equal(pool[:, [1, 0, 3]], tensors.numpy()[:, ids, head])


def test_an_engine_whose_heads_are_inside_of_opaque_pages_keeps_its_tp() -> None:
    raw = torch.zeros(LAYERS, PAGES, HEADS * TOKENS * CHANNELS)
    spec = spec_of(component("k"), granule=TOKENS)
    views = [TensorView.of(tensor) for tensor in raw]
    at = declare(spec, "k", ("page",), views, buffer="raw", buffer_bytes=raw.nbytes)
    opaque = with_placements(spec, at)
    plan(opaque, opaque)
    with pytest.raises(LayoutError, match="the layout inside a granule differs"):
        plan(opaque, spec_of(component("k", units=Units(HEADS)), layout="tp2", granule=TOKENS, order=NHD))


NHD = ("layer", "page", "token", "unit")
LATENT = Component("latent", ((0, LAYERS),), None, (Dim("channel", 576),), Full(), "tokens", "latent")


def test_a_latent_cache_with_a_head_axis_of_one() -> None:
    raw = torch.zeros(LAYERS, PAGES, 1, TOKENS, 576)
    spec = spec_of(LATENT, granule=TOKENS)
    views = [TensorView.of(tensor) for tensor in raw]
    at = declare(
        spec, "latent", ("page", "unit", "token", "channel"), views, buffer="a", buffer_bytes=raw.nbytes
    )
    dense = placements(spec, 0, "pool")["latent"]
    found = placements(with_placements(spec, at), 0, "pool")["latent"]
    assert {axis: found.stride(axis) for axis in ("layer", "page", "token", "channel")} == {
        axis: dense.stride(axis) for axis in ("layer", "page", "token", "channel")
    }


# What is refused.

GOOD = DeclaredPlacement(
    component="k",
    buffer="raw",
    buffer_bytes=100_000,
    offset=8,
    strides=(("layer", 8000), ("page", 1200), ("unit", 400), ("token", 60), ("channel", 12)),
)


def strides(**changes: int | None) -> tuple[tuple[str, int], ...]:
    return tuple((axis, size) for axis, size in (dict(GOOD.strides) | changes).items() if size is not None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offset": -4}, "its offset is -4 bytes"),
        ({"offset": 6}, "its offset is 6 bytes, not a multiple of elements of 4"),
        ({"strides": strides(page=0)}, "a stride of 0 bytes along page"),
        ({"strides": strides(layer=-8000)}, "a stride of -8000 bytes along layer"),
        ({"strides": strides(token=62)}, "its stride along token is 62 bytes, not a multiple"),
        ({"strides": strides(head=62)}, "strides for .*head; name each of layer, page, unit, token, channel"),
        ({"strides": (*GOOD.strides, ("page", 1200))}, "at most once"),
        ({"strides": strides(page=None)}, "there are 6 along page, so it needs a stride"),
        ({"strides": strides(layer=None)}, "there are 3 along layer, so it needs a stride"),
        ({"strides": strides(unit=None)}, "there are 2 along unit, so it needs a stride"),
        ({"strides": strides(token=None)}, "without a stride along token its pages are opaque"),
        ({"strides": strides(token=48)}, "overlaps itself: it is 48 bytes from one token .* over 52 bytes"),
        ({"strides": strides(page=628)}, "overlaps itself: it is 628 bytes from one page .* over 632 bytes"),
        ({"buffer_bytes": 22_639}, "reaches to byte 22640 of buffer 'raw', which has 22639 bytes"),
        ({"buffer": "staging"}, "give the buffer another name"),
        ({"layer_offsets": (0, 8000, 16000)}, "a stride along layer or layer_offsets, not both"),
        ({"strides": strides(layer=None), "layer_offsets": (0, 8000)}, "2 layer_offsets for 3 layers"),
        ({"strides": strides(layer=None), "layer_offsets": (0, 8000, 9)}, "offset of its layer 2 is 9 bytes"),
        (
            {"strides": strides(layer=None), "layer_offsets": (0, 8000, 14000)},
            r"k \(layer 1\) and k \(layer 2\) of group 'tokens' overlap in buffer 'raw': bytes 14008 to",
        ),
        ({"component": "v"}, "no placement of k on stage 0, tp 0"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_in_words(changes: dict[str, Any], text: str) -> None:
    spec = spec_of(component("k"))
    placements(with_placements(spec, replace(GOOD, buffer_bytes=22_640)), 0, "pool")
    with pytest.raises(ConfigError, match=text):
        placements(with_placements(spec, replace(GOOD, **changes)), 0, "pool")


def test_a_component_is_placed_once_and_where_there_is_one() -> None:
    spec = spec_of(component("k"), layout="tp2")
    for twice in ((GOOD, GOOD), (GOOD, replace(GOOD, tp=1)), (replace(GOOD, tp=1), GOOD)):
        with pytest.raises(ConfigError, match=r"placement of k on stage 0.* is given twice"):
            with_placements(spec, *twice)
    for stray in (replace(GOOD, stage=1), replace(GOOD, component="v")):
        with pytest.raises(ConfigError, match="tp2 has no such component, stage or tp coordinate"):
            placements(with_placements(spec, GOOD, stray), 0, "pool")


def test_components_of_one_group_keep_out_of_each_others_bytes() -> None:
    spec = spec_of(component("k"), component("v"))
    beside = replace(GOOD, component="v", offset=12)
    spec_to_bytes(with_placements(spec, GOOD, beside))
    for offset in (8, 20, 8020, 68):
        spec_bad = with_placements(spec, GOOD, replace(beside, offset=offset, buffer_bytes=100_000))
        with pytest.raises(
            ConfigError, match=r"k and v of group 'tokens' overlap in buffer 'raw': bytes \d+ to"
        ):
            placements(spec_bad, 0, "pool")
        with pytest.raises(ConfigError, match=r"spec.storage: k and v of group 'tokens' overlap"):
            spec_to_bytes(spec_bad)
    with pytest.raises(
        ConfigError, match=r"buffer 'raw' has 100000 bytes in the placement of k .* and 90000 in"
    ):
        placements(with_placements(spec, GOOD, replace(beside, buffer_bytes=90_000)), 0, "pool")


def test_groups_overlay_each_other_page_by_page() -> None:
    """As in a hybrid model: layers of both groups in one tensor, block ids from one pool."""
    window = component("k.w8", extent=Window(8), group="window")
    state = Component("ssm", ((0, 2),), Units(HEADS), (Dim("state", 7),), State(), "state", "state")
    spec = spec_of(component("k"), window, state)
    overlay = replace(GOOD, component="k.w8")
    apart = replace(
        GOOD, component="ssm", buffer="states", strides=(("layer", 999 * 4), ("page", 64), ("unit", 28))
    )
    good = with_placements(spec, GOOD, overlay, apart)
    assert page_spaces(good, 0) == {"tokens": "tokens", "window": "tokens", "state": "state"}
    with_state = replace(
        apart, buffer="raw", offset=GOOD.offset, strides=(("layer", 8000), ("page", 1200), ("unit", 28))
    )
    every = with_placements(spec, GOOD, overlay, with_state)
    assert set(page_spaces(every, 0).values()) == {"state"}
    for wrong in (
        replace(overlay, offset=GOOD.offset + 1200),
        replace(overlay, offset=GOOD.offset + 1200 - 400),
        replace(overlay, strides=strides(page=1204)),
    ):
        with pytest.raises(
            ConfigError, match=r"k of group 'tokens' and k.w8 of group 'window' overlay each other"
        ):
            placements(with_placements(spec, GOOD, wrong, apart), 0, "pool")


@pytest.mark.parametrize(
    ("axes", "shape", "text"),
    [
        (
            ("page", "unit", "token", "channel"),
            (PAGES, HEADS + 1, TOKENS, CHANNELS),
            "has 3 along unit, the spec 2",
        ),
        (
            ("page", "unit", "token", "channel"),
            (PAGES - 1, HEADS, TOKENS, CHANNELS),
            "has 5 along page, the spec 6",
        ),
        (("page", "head", "token", "channel"), (PAGES, HEADS, TOKENS, CHANNELS), "there is no axis 'head'"),
        (("page", "unit", "token"), (PAGES, HEADS), "name each axis once"),
        (("page", "page", "token"), (PAGES, HEADS, TOKENS), "name each axis once"),
        (
            ("page",),
            (PAGES, HEADS, TOKENS + 1, CHANNELS),
            "hold 50 elements, but 40 of unit, token, channel are left",
        ),
        (("page", "unit", "token"), (PAGES, HEADS, TOKENS), "hold 1 elements, but 5 of channel are left"),
    ],
)
def test_views_that_do_not_fit_the_spec_are_refused(axes, shape, text: str) -> None:
    spec = spec_of(component("k"))
    views = [TensorView.of(torch.zeros(LAYERS, *shape)[layer]) for layer in range(LAYERS)]
    where = {"buffer": "raw", "buffer_bytes": 100_000}
    with pytest.raises(ConfigError, match=text):
        declare(spec, "k", axes, views, **where)
    good = [TensorView.of(torch.zeros(PAGES, HEADS, TOKENS, CHANNELS))] * LAYERS
    usual = ("page", "unit", "token", "channel")
    for wrong, reason in (
        ((spec, "x", usual, good), "no component 'x' in the cache; it has k"),
        ((spec, "k", usual, good[:2]), "2 views for 3 layers"),
        ((spec, "k", ("layer", *usual), good), "3 views with an axis for layers"),
        ((spec, "k", usual, [*good[:2], TensorView(0, (1,), (1,), 4)]), "differ in shape or strides"),
        (
            (spec, "k", ("page",), [TensorView.of(torch.zeros(PAGES, 5, 8).transpose(1, 2))] * 3),
            "have to be dense",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            declare(*wrong, **where)
    elsewhere = replace(spec_of(component("k", layers=((0, 1),))), layout=parse_layout("pp3"))
    with pytest.raises(ConfigError, match="k on stage 2 of pp3: the stage holds no layers of it"):
        declare(elsewhere, "k", usual, [], **where, stage=2)
    with pytest.raises(ConfigError, match="tp1 has no stage 1"):
        declare(spec, "k", usual, good, **where, stage=1)


def test_an_expanded_tensor_is_refused() -> None:
    spec = spec_of(component("k"))
    views = [TensorView.of(torch.zeros(1, HEADS, TOKENS, CHANNELS).expand(PAGES, -1, -1, -1))] * LAYERS
    at = declare(spec, "k", ("page", "unit", "token", "channel"), views, buffer="raw", buffer_bytes=100_000)
    with pytest.raises(ConfigError, match="a stride of 0 bytes along page"):
        placements(with_placements(spec, at), 0, "pool")


# The check itself, against every byte.


def random_region(rng: random.Random, name: str) -> PlacedRegion:
    """A small region whose strides nest."""
    sizes = [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 3))]
    length = rng.choice([1, 1, 2, 3])
    reach, axes, pages = length, [], (1, 1)
    page_axis = rng.randint(0, len(sizes))
    for i, count in enumerate([*sizes[:page_axis], rng.choice([1, 2, 3, 4]), *sizes[page_axis:]]):
        stride = reach + rng.choice([0, 0, 0, 1, 2, 5])
        if i == page_axis:
            pages = (count, stride)
        elif count > 1:
            axes.append((count, stride))
        reach += (count - 1) * stride
    return PlacedRegion(name, rng.choice("AB"), rng.randrange(12), pages, tuple(reversed(axes)), length)


def bytes_by_page(region: PlacedRegion) -> list[set[int]]:
    first = {region.start}
    for count, stride in (*region.axes, (region.length, 1)):
        first = {at + i * stride for at in first for i in range(count)}
    return [{at + page * region.pages[1] for at in first} for page in range(region.pages[0])]


def right_verdict(regions: list[PlacedRegion]) -> tuple[bool, set[frozenset[str]]]:
    """Whether regions may lie as they do, and the groups that share bytes."""
    may, groups = True, set()
    for one, other in itertools.combinations(regions, 2):
        for (p, mine), (q, theirs) in itertools.product(
            enumerate(bytes_by_page(one)), enumerate(bytes_by_page(other))
        ):
            if mine & theirs:
                groups.add(frozenset({one.group, other.group}))
                may = may and one.group != other.group and p == q
    return may, groups


@given(st.integers(0, 1 << 30))
def test_overlaps_are_found_and_nothing_else_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        regions = [random_region(rng, f"c{i}") for i in range(rng.randint(2, 4))]
        if rng.random() < 0.4:
            # Frames of one length, as in an engine's pages.
            stride = max(region.first_stop - region.start for region in regions) + rng.choice([0, 1, 6])
            regions = [replace(region, pages=(region.pages[0], stride)) for region in regions]
        may, groups = right_verdict(regions)
        found, refusal = verdict(regions)
        # Unlike page strides are refused as soon as pages past the first meet.
        is_strict = len({region.pages[1] for region in regions if region.pages[0] > 1}) > 1
        assert may or refusal, regions
        assert not (may and refusal) or (is_strict and "overlay" in refusal), regions
        assert refusal or found == groups


def verdict(regions: list[PlacedRegion]) -> tuple[set[frozenset[str]], str]:
    """The groups that share bytes, and why the regions are refused."""
    try:
        found = OverlapCheck().overlays("raw", regions)
    except ConfigError as error:
        return set(), str(error)
    return {frozenset(pair) for pair in found}, ""


def test_a_check_that_would_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, coarse = PlacedRegion("a", "A", 0, (9000, 2), (), 1), PlacedRegion("b", "A", 1, (3000, 6), (), 1)
    assert OverlapCheck().overlays("raw", [fine, coarse]) == set()
    monkeypatch.setattr(declared, "STEPS_MAX", 1000)
    with pytest.raises(ConfigError, match="too intricate: more than 1000 steps"):
        OverlapCheck().overlays("raw", [fine, coarse])
    many = [PlacedRegion(f"c{i}", f"g{i}", 0, (1, 1), (), 4) for i in range(60)]
    with pytest.raises(ConfigError, match="too intricate"):
        OverlapCheck().overlays("raw", many)
