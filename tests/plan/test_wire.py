"""Specs as bytes: what is written can be read, and what is not a spec is refused with the field's name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.world import World, make_cache, worlds

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import Cache, Component, Dim, Full, State, Units
from baton.plan.kinds import Index, Paged
from baton.plan.layout import parse_layout
from baton.plan.models import card_names, load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.storage import Storage, parse_storage
from baton.plan.wire import LAYERS_MAX, SPEC_BYTES_MAX, spec_from_bytes, spec_to_bytes
from baton.sim.families import draw_placements

LAYOUTS = ["tp1", "dp2.pp2:1-3.cp3:stripe5.tp2", "cp4:split.tp2", "tp4.cp2:mirror", "cp2", "pp2:2-2.tp1"]


def small(**changes: Any) -> Spec:
    cache = make_cache(4, (Paged(2, 8, 6, 16), ((0, 2),)), (Index(4, 1), ((1, 2), (3, 4))))
    return replace(Spec(parse_layout("pp2.tp2"), cache, parse_storage("nhd.fused", 16, "bf16")), **changes)


@settings(max_examples=max(1, settings().max_examples // 2))
@given(worlds())
def test_every_spec_comes_back(world: World) -> None:
    for spec in (world.source, world.target):
        raw = spec_to_bytes(spec)
        found = spec_from_bytes(raw)
        assert found == spec
        assert hash(found) == hash(spec)
        assert spec_to_bytes(found) == raw
    again = [spec_from_bytes(spec_to_bytes(spec)) for spec in (world.source, world.target)]
    made = plan(world.source, world.target, world.source_dp, world.target_dp)
    assert plan.__wrapped__(*again, world.source_dp, world.target_dp).routes == made.routes


@pytest.mark.parametrize("name", card_names())
def test_every_card_comes_back(name: str) -> None:
    cache = load_cache(name)
    for layout in ("tp1", "dp4.tp2", "pp2.cp2:stripe1.tp2"):
        spec = Spec(parse_layout(layout), cache, Storage(num_pages=(("tokens", 7), ("state", 1))))
        assert spec_from_bytes(spec_to_bytes(spec)) == spec


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_options_come_back(layout: str) -> None:
    spec = small(layout=parse_layout(layout))
    assert spec_from_bytes(spec_to_bytes(spec)).layout == spec.layout


def test_a_spec_from_elsewhere_is_told_apart() -> None:
    raws = {
        spec_to_bytes(spec)
        for spec in (
            small(),
            small(layout=parse_layout("tp2.pp2")),
            small(storage=replace(small().storage, granule=4)),
            small(storage=small().storage.with_pages({"tokens": 3})),
            small(cache=make_cache(4, (Paged(2, 8, 6, 17), ((0, 2),)))),
        )
    }
    assert len(raws) == 5


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        found.extend(paths(part, (*at, key)))
    return found


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with one place changed."""
    if not at:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[at[0]] = put(value[at[0]], at[1:], new)
    return changed


def small_declared() -> Spec:
    """The same in memory that an engine has: one buffer for a stage, uneven layers."""
    return draw_placements(random.Random(1), small(storage=Storage(16, "bf16")))


GOOD = json.loads(spec_to_bytes(small()))
DECLARED = json.loads(spec_to_bytes(small_declared()))
RUBBISH = [
    None,
    True,
    0,
    -1,
    1.5,
    1 << 70,
    float("nan"),
    "",
    "x" * 200,
    "\u00e9",
    "a\nb",
    [],
    {},
    [[]],
    ["k", 1],
]


@pytest.mark.parametrize("at", paths(GOOD), ids=lambda at: ".".join(map(str, at)) or "spec")
def test_rubbish_anywhere_is_refused_or_is_a_spec(at: tuple[Any, ...]) -> None:
    texts = [refusal(json.dumps(put(GOOD, at, new)).encode()) for new in RUBBISH]
    assert texts.count("") <= 4, "a value that is right elsewhere may be right here, few are"
    assert all("spec" in text and len(text) < 1000 for text in texts if text)


@pytest.mark.parametrize(
    "at",
    [at for at in paths(DECLARED) if at[:2] == ("storage", "placements") and at[2:3] in ((), (0,))],
    ids=lambda at: ".".join(map(str, at)),
)
def test_rubbish_in_a_placement_is_refused_or_is_a_spec(at: tuple[Any, ...]) -> None:
    texts = [refusal(json.dumps(put(DECLARED, at, new)).encode()) for new in RUBBISH]
    assert texts.count("") <= 4
    assert all("spec" in text and len(text) < 1000 for text in texts if text)


def test_placements_come_back_and_are_told_apart() -> None:
    spec = small_declared()
    assert any(at.layer_offsets for at in spec.storage.placements) or spec.layout.size("pp") > 1
    raw = spec_to_bytes(spec)
    assert spec_from_bytes(raw) == spec
    again = spec.storage.with_placements(reversed(spec.storage.placements))
    assert spec_to_bytes(replace(spec, storage=again)) == raw, "whatever the order in which it was declared"
    first, *rest = spec.storage.placements
    wider = replace(first, buffer_bytes=first.buffer_bytes + 4)
    others = [
        replace(at, buffer_bytes=at.buffer_bytes + 4)
        if (at.stage, at.tp, at.buffer) == (first.stage, first.tp, first.buffer)
        else at
        for at in rest
    ]
    assert spec_to_bytes(replace(spec, storage=spec.storage.with_placements([wider, *others]))) != raw
    assert "placements" not in json.loads(spec_to_bytes(small()))["storage"], "as before where there are none"


def refusal(raw: bytes) -> str:
    """Why bytes are no spec, or nothing where they are one."""
    try:
        spec_from_bytes(raw)
    except (ConfigError, LayoutError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("at", "new", "field"),
    [
        (("layout",), "tp0", "spec.layout 'tp0'"),
        (("layout",), "tp2." * 9000 + "tp2", "spec.layout"),
        (("cache", "num_layers"), LAYERS_MAX + 1, "spec.cache.num_layers"),
        (("cache", "num_layers"), True, "spec.cache.num_layers"),
        (("cache", "components"), [], "spec.cache: a cache needs"),
        (("cache", "components", 0, "name"), "zzz", "spec.cache: component names"),
        (("cache", "components", 0, "name"), "staging", r"components\[0\].name"),
        (("cache", "components", 0, "bundle"), "staging", r"components\[0\].bundle"),
        (("cache", "components", 0, "layers"), [[2, 1]], "spec.cache: component index_k"),
        (("cache", "components", 0, "layers", 0, 1), LAYERS_MAX + 1, r"components\[0\].layers\[0\]\[1\]"),
        (("cache", "components", 0, "dims", 0), ["token", 3], r"components\[0\].dims"),
        (("cache", "components", 0, "dims"), [["a", 1], ["a", 2]], r"components\[0\].dims"),
        (("cache", "components", 0, "dims"), [["a", 1]] * 9, r"components\[0\].dims"),
        (("cache", "components", 0, "extent"), ["window", 0], r"extent\[1\]"),
        (("cache", "components", 0, "extent"), ["full", 3], r"extent\[1\]"),
        (("cache", "components", 0, "extent"), ["half", 0], r"extent\[0\]"),
        (("cache", "components", 0, "units"), [0, "head"], r"units\[0\]"),
        (("cache", "components", 0, "dtype"), "fp4", "dtype"),
        (("storage", "dtype"), "int8", "spec.storage.dtype"),
        (("storage", "granule"), 3, "spec.storage: granule 3"),
        (("storage", "order"), ["layer", "page"], "spec.storage: axis order"),
        (("storage", "page_tokens"), 0, "spec.storage.page_tokens"),
        (("storage", "num_pages"), [["tokens", 1 << 31]], r"num_pages\[0\]\[1\]"),
        (("storage", "num_pages"), [["a", 1], ["a", 2]], "num_pages"),
        (("storage", "num_pages_default"), -1, "num_pages_default"),
    ],
)
def test_the_field_is_named(at: tuple[Any, ...], new: Any, field: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=field):
        spec_from_bytes(json.dumps(put(GOOD, at, new)).encode())


@pytest.mark.parametrize(
    ("at", "new", "field"),
    [
        ((), [], "spec.storage.placements: expected `array` of length >= 1, found"),
        ((0, "offset"), -1, r"placements\[0\].offset: expected `int` >= 0, found -1"),
        ((0, "buffer"), "staging", r"placements\[0\].buffer"),
        ((0, "buffer_bytes"), 8, "spec.storage: placement of index_k on stage .* reaches to byte"),
        ((0, "stage"), 2, r"spec.storage: no placement of index_k on stage|spec.storage: .* has no such"),
        ((0, "strides", 0, 1), 0, r"placements\[0\].strides\[0\]\[1\]: expected `int` >= 1, found 0"),
        ((0, "strides", 0, 0), "row", "spec.storage: placement of index_k .* strides for row"),
        ((0, "component"), "kk", "spec.storage: no placement of index_k"),
        ((0, "layer_offsets"), [0] * 9, "spec.storage: placement of index_k"),
    ],
)
def test_the_field_of_a_placement_is_named(at: tuple[Any, ...], new: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        spec_from_bytes(json.dumps(put(DECLARED, ("storage", "placements", *at), new)).encode())


def test_unknown_and_missing_fields_are_refused() -> None:
    for at in ((), ("cache",), ("storage",), ("cache", "components", 0)):
        held = GOOD
        for key in at:
            held = held[key]
        for changed in ({**held, "more": 1}, dict(list(held.items())[1:])):
            with pytest.raises(ConfigError, match=r"^spec.*: object (contains|missing) .* field"):
                spec_from_bytes(json.dumps(put(GOOD, at, changed)).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 10_000,
        b"\xff\xfe{}",
        b'{"layout":"tp1","layout":"tp1"}',
        b"{}" + b" " * SPEC_BYTES_MAX,
        json.dumps(GOOD).encode("utf-16"),
    ],
    ids=range(9),
)
def test_what_is_no_spec_at_all(raw: bytes) -> None:
    with pytest.raises(ConfigError, match="spec"):
        spec_from_bytes(raw)


@given(st.integers(0, 1 << 30))
def test_damaged_bytes_are_refused_in_words(seed: int) -> None:
    rng = random.Random(seed)
    raw = bytearray(spec_to_bytes(small()))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at : at + rng.randint(1, 20)]
            case _:
                raw[at:at] = rng.choice([b"[", b"{", b"9", b'"', b"-", b"null", b",", b"}", b"]"])
    try:
        found = spec_from_bytes(bytes(raw))
    except (ConfigError, LayoutError):
        return
    assert spec_from_bytes(spec_to_bytes(found)) == found


def component(name: str, **changes: Any) -> Component:
    plain = Component(name, ((0, 1),), Units(2), (Dim("channel", 4),), Full(), "tokens", "kv")
    return replace(plain, **changes)


def test_pools_that_share_a_name_are_refused() -> None:
    state = component("kv", extent=State(), group="state", bundle="state")
    cache = Cache(1, (component("k"), state))
    fused = Storage(
        order=("layer", "page", "component", "unit", "token"), state_order=("layer", "page", "unit")
    )
    with pytest.raises(ConfigError, match="both kept in buffer 'kv'"):
        spec_to_bytes(Spec(parse_layout("tp1"), cache, fused))
    spec_to_bytes(Spec(parse_layout("tp1"), cache, replace(fused, order=("layer", "page", "unit", "token"))))


def test_pools_beyond_all_offsets_are_refused() -> None:
    dims = (Dim("a", 1 << 20), Dim("b", 1 << 20))
    cache = Cache(1, (component("k", dims=dims),))
    with pytest.raises(ConfigError, match="larger than"):
        spec_to_bytes(Spec(parse_layout("tp1"), cache, Storage(num_pages_default=1 << 20)))
    spec_to_bytes(Spec(parse_layout("tp1"), cache, Storage(num_pages_default=1 << 10)))


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(ConfigError, match="name"):
        spec_to_bytes(small(cache=Cache(1, (component("caf\u00e9"),))))
    many = tuple(component(f"k{i:03}", layers=((0, LAYERS_MAX),)) for i in range(5))
    with pytest.raises(ConfigError, match="layers together"):
        spec_to_bytes(small(cache=Cache(LAYERS_MAX, many)))


@given(worlds(), st.integers(0, 1 << 30))
def test_what_is_accepted_can_be_planned_with_or_is_refused_in_words(world: World, seed: int) -> None:
    """A value replaced by another of its type: still a spec perhaps, but of a stranger."""
    rng = random.Random(seed)
    found = json.loads(spec_to_bytes(world.source))
    for _ in range(rng.randint(1, 3)):
        places = paths(found)
        at = rng.choice(places)
        values = [value_at(found, other) for other in places]
        alike = [value for value in values if type(value) is type(value_at(found, at))]
        found = put(found, at, rng.choice(alike))
    try:
        stranger = spec_from_bytes(json.dumps(found).encode())
        plan(stranger, world.target, 0, world.target_dp)
        plan(world.target, stranger, world.target_dp, 0)
    except (ConfigError, LayoutError):
        return


def value_at(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        value = value[key]
    return value
