"""What each end works out alone, held against `bind`, which knows both, and against the design's words."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.test_property import FILL, chunks_of, count_writes, padded
from tests.plan.world import World, holdings, make_cache, needed, page_tables, put, raw_values, worlds

from baton.errors import ConfigError
from baton.plan.binding import Tables, bind
from baton.plan.cache import Cache
from baton.plan.execution import Memory, allocate, execute
from baton.plan.kinds import Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.packing import ALWAYS_PACK, NEVER_PACK, PackCost
from baton.plan.parts import Part
from baton.plan.planner import plan
from baton.plan.prompt import Chunk, Prompt, resolve
from baton.plan.routes import Plan
from baton.plan.sides import (
    CONVERT,
    DIRECT,
    PACK,
    Mode,
    Need,
    canonical,
    check_pages,
    chunk_bytes,
    direct_copies,
    expected_bytes,
    modes,
    needs,
    pages_read,
    part_bytes,
    parts_of,
    places_in_staging,
    source_steps,
    staging_bytes,
    target_steps,
    writable,
)
from baton.plan.stencils import SPANS_MAX, Strip
from baton.plan.steps import STAGING, Copy, Pack, Spans, Step, Unpack
from baton.plan.storage import parse_storage
from baton.plan.tokens import set_runs

FEWER = settings(max_examples=max(1, settings().max_examples // 4))
"""Each example here looks at many chunks and pairs, by many tests."""


@dataclass(frozen=True)
class Scene:
    """A world with its plan, its page tables and filled source buffers."""

    world: World

    @cached_property
    def plan(self) -> Plan:
        world = self.world
        return plan(world.source, world.target, world.source_dp, world.target_dp)

    @cached_property
    def tables(self) -> Tables:
        rng = np.random.default_rng(self.world.seed)
        sides = ((self.world.source, self.world.source_dp), (self.world.target, self.world.target_dp))
        return Tables(*(page_tables(spec, dp, rng) for spec, dp in sides))

    @property
    def prompt(self) -> Prompt:
        return self.world.prompt

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return sorted({(route.source, route.target) for route in self.plan.routes})

    @property
    def whole(self) -> Chunk:
        return Chunk((0, 1000), (0, self.prompt.num_tokens))

    @cached_property
    def source(self) -> Memory:
        world = self.world
        found = allocate(world.source, world.source_dp, "source", 0x5A)
        for held in self.held_by_source:
            put(
                found[held.rank, held.buffer],
                held.offsets,
                raw_values(held.identities, held.item_bytes, world.seed),
            )
        return found

    @property
    def held_by_source(self):
        world = self.world
        entries = padded(world.prompt, world.source.storage.granule)
        return holdings(world.source, world.source_dp, entries, self.tables.source, "source")

    def target(self) -> Memory:
        return allocate(self.world.target, self.world.target_dp, "target", FILL)

    def is_converted(self, name: str) -> bool:
        sides = (self.world.source, self.world.target)
        return len({spec.storage.dtype_of(spec.cache.by_name[name]) for spec in sides}) > 1

    def plain(self, pair: tuple[int, int]) -> str:
        """The mode without packing."""
        names = {route.component for route in self.plan.routes if (route.source, route.target) == pair}
        return CONVERT if any(map(self.is_converted, names)) else DIRECT

    def mode(self, pair: tuple[int, int], *, is_packed: bool) -> str:
        """The mode that a pair is forced into; granules are never packed."""
        return PACK if is_packed and self.world.source.storage.granule == 1 else self.plain(pair)

    def at_source(self, chunk: Chunk, pair: tuple[int, int]):
        return parts_of(self.plan, self.prompt, self.tables, chunk, pair)

    def at_target(self, chunk: Chunk, pair: tuple[int, int]):
        """What a target rank can find with its own tables."""
        own = {pair[1]: self.tables.target[pair[1]]}
        return parts_of(self.plan, self.prompt, Tables({}, own), chunk, pair)

    def bound(self, chunk: Chunk, cost: PackCost) -> dict[tuple[int, int], list[Step]]:
        """What `bind` gives, by pair."""
        found: dict[tuple[int, int], list[Step]] = {pair: [] for pair in self.pairs}
        for step in bind(self.plan, self.prompt, self.tables, chunk, cost):
            found[step.source, step.target].append(step)
        return found

    def some_pairs(self) -> list[tuple[int, int]]:
        """Up to three pairs: many hypothesis examples look at more than all pairs of few would."""
        return random.Random(self.world.seed).sample(self.pairs, min(3, len(self.pairs)))


def plain(step: Step) -> tuple:
    """A step as values that can be compared."""
    spans = tuple(part.tolist() for part in (step.spans.source, step.spans.target, step.spans.length))
    names = [getattr(step, name) for name in step.__slots__ if name != "spans"]
    return (type(step).__name__, *names, spans)


@FEWER
@given(worlds())
def test_the_two_ends_together_do_what_bind_does(world: World) -> None:
    scene = Scene(world)
    is_packed = bool(world.seed % 2)
    cost = ALWAYS_PACK if is_packed else NEVER_PACK
    apart, together = scene.target(), scene.target()
    for chunk in chunks_of(world, random.Random(world.seed)):
        steps: list[Step] = []
        wanted = scene.bound(chunk, cost)
        for pair, bound in wanted.items():
            mode = scene.mode(pair, is_packed=is_packed)
            mine = source_steps(scene.at_source(chunk, pair), mode)
            theirs = target_steps(scene.at_target(chunk, pair), mode)
            assert [plain(s) for s in mine] == [plain(s) for s in bound if not isinstance(s, Unpack)]
            assert [plain(s) for s in theirs] == [plain(s) for s in bound if isinstance(s, Unpack)]
            steps += [*mine, *theirs]
        execute(steps, scene.source, apart)
        execute(itertools.chain(*wanted.values()), scene.source, together)
    for key, buffer in together.items():
        np.testing.assert_array_equal(apart[key], buffer, err_msg=str(key))


@FEWER
@given(worlds())
def test_modes_follow_the_whole_prompt_and_staging_holds_any_cut(world: World) -> None:
    scene = Scene(world)
    cost = [NEVER_PACK, ALWAYS_PACK, PackCost(span_s=2e-6)][world.seed % 3]
    found = modes(scene.plan, scene.prompt, cost)
    assert set(found) == set(expected_bytes(scene.plan, scene.prompt)) == set(needs(scene.plan, scene.prompt))
    chunks = chunks_of(world, random.Random(world.seed))
    bound = scene.bound(scene.whole, cost)
    for pair, chosen in found.items():
        kinds = {type(step) for step in bound[pair]}
        assert chosen.mode == (PACK if Pack in kinds else scene.plain(pair))
        places = [places_in_staging(scene.at_target(chunk, pair), chosen.mode) for chunk in chunks]
        used = sum(max((stop for _, stop in found.values()), default=0) for found in places)
        assert chosen.staging_bytes == used == staging_bytes(scene.plan, scene.prompt, pair, chosen.mode)
        assert (chosen.staging_bytes == 0) == (Unpack not in kinds)


def cells(chunks: list[Chunk]) -> set[tuple[int, int]]:
    return {
        cell for chunk in chunks for cell in itertools.product(range(*chunk.layers), range(*chunk.tokens))
    }


def carrying(scene: Scene) -> dict[tuple[int, int], set[tuple[int, int, str]]]:
    """By pair: each layer with the token whose chunk brings something, and of which component."""
    found: dict[tuple[int, int], set[tuple[int, int, str]]] = {}
    granule, last = scene.world.source.storage.granule, scene.prompt.num_tokens - 1
    for route in resolve(scene.plan, scene.prompt):
        tokens = {last}
        if route.tokens is not None:
            spelt = set_runs(route.tokens)
            every = [t for a, b in zip(spelt.starts, spelt.stops, strict=True) for t in range(a, b)]
            tokens = {min(token - token % granule + granule - 1, last) for token in every}
        layers = [layer for a, b in route.layers for layer in range(a, b)]
        brought = {(*cell, route.component) for cell in itertools.product(layers, tokens)}
        found.setdefault((route.source, route.target), set()).update(brought)
    return found


def first_wanted(scene: Scene, name: str) -> int:
    component, granule = scene.world.target.cache.by_name[name], scene.world.source.storage.granule
    if not component.extent.has_tokens:
        return scene.prompt.num_tokens - 1
    tokens = np.arange(padded(scene.prompt, granule))
    return int(tokens[needed(component, scene.prompt, granule, tokens)][0])


@FEWER
@given(worlds())
def test_needs_begin_where_the_first_component_of_a_layer_does(world: World) -> None:
    scene = Scene(world)
    wanted = {}
    for pair, brought in carrying(scene).items():
        starts: dict[int, int] = {}
        for layer, _, name in brought:
            start = first_wanted(scene, name)
            starts[layer] = min(start, starts.get(layer, start))
        wanted[pair] = starts
    found = needs(scene.plan, scene.prompt)
    assert wanted == {
        pair: {layer: need.start for need in several for layer in range(*need.layers)}
        for pair, several in found.items()
    }
    for several in found.values():
        for left, right in itertools.pairwise(several):
            assert left.layers[1] < right.layers[0] or left.start != right.start


@FEWER
@given(worlds(), st.integers(0, 1 << 30))
def test_bytes_are_complete_when_the_needed_cells_are(world: World, seed: int) -> None:
    """Both ways: with all needed cells every byte goes once; without one that brings bytes, they miss.

    Not every needed cell brings bytes: the tokens in between may be another rank's, or complete no granule.
    """
    scene, rng = Scene(world), random.Random(seed)
    chunks = chunks_of(world, rng)
    kept = [chunk for chunk in chunks if rng.random() < 0.8] if rng.random() < 0.7 else chunks
    there = cells(kept)
    brought = carrying(scene)
    found, expected = needs(scene.plan, scene.prompt), expected_bytes(scene.plan, scene.prompt)
    assert set(brought) == set(found) == set(expected)
    bound = [scene.bound(chunk, NEVER_PACK) for chunk in kept]
    every, target = scene.bound(scene.whole, NEVER_PACK), scene.target()
    for pair, several in found.items():
        wanted = {
            cell
            for need in several
            for cell in itertools.product(range(*need.layers), range(need.start, scene.prompt.num_tokens))
        }
        assert {(layer, token) for layer, token, _ in brought[pair]} <= wanted
        totals: dict[str, int] = {}
        for chunk in kept:
            for name, num_bytes in chunk_bytes(scene.plan, scene.prompt, chunk, pair).items():
                totals[name] = totals.get(name, 0) + num_bytes
        is_complete = {(layer, token) for layer, token, _ in brought[pair]} <= there
        assert (totals == expected[pair]) == is_complete
        assert is_complete or not wanted <= there
        own = {key: buffer for key, buffer in target.items() if key[0] == pair[1]}
        writes = count_writes([step for steps in bound for step in steps[pair]], own)
        for key, counts in count_writes(every[pair], own).items():
            assert (writes[key] <= 1).all()
            assert not is_complete or (counts == writes[key]).all()


@FEWER
@given(worlds())
def test_bytes_by_component(world: World) -> None:
    scene = Scene(world)
    wanted: dict[tuple[int, int], dict[str, int]] = {}
    for route in resolve(scene.plan, scene.prompt):
        sizes = wanted.setdefault((route.source, route.target), {})
        sizes[route.component] = sizes.get(route.component, 0) + route.num_bytes
    assert expected_bytes(scene.plan, scene.prompt) == wanted
    for chunk in chunks_of(world, random.Random(world.seed)):
        bound = scene.bound(chunk, NEVER_PACK)
        for pair in scene.pairs:
            sizes = chunk_bytes(scene.plan, scene.prompt, chunk, pair)
            assert sizes == part_bytes(scene.at_source(chunk, pair))
            copies = [step for step in bound[pair] if isinstance(step, Copy)]
            assert sum(sizes.values()) == sum(step.spans.num_bytes for step in copies)


@FEWER
@given(worlds())
def test_copies_found_the_short_way_are_those_of_the_long_one(world: World) -> None:
    """Stencils are filled in for two sets of page tables: what they keep may not depend on the first."""
    scene, other = Scene(world), Scene(replace(world, seed=world.seed + 1))
    for chunk in chunks_of(world, random.Random(world.seed)):
        for pair in scene.some_pairs():
            if scene.plain(pair) != DIRECT:
                assert direct_copies(scene.plan, scene.prompt, scene.tables, chunk, pair) is None
                continue
            for tables in (scene.tables, other.tables):
                parts = parts_of(scene.plan, scene.prompt, tables, chunk, pair)
                found = direct_copies(scene.plan, scene.prompt, tables, chunk, pair)
                assert found is not None
                assert [plain(step) for step in found[0]] == [plain(s) for s in source_steps(parts, DIRECT)]
                assert found[1] == part_bytes(parts)


def test_groups_of_layers_are_cut_from_one_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine cuts is another place each time; finding the spans of its tokens anew would cost."""
    made: list[int] = []
    strip_of = Strip.of

    def counted(part: Part, giver: str, taker: str) -> Strip:
        made.append(part.num_layers)
        return strip_of(part, giver, taker)

    monkeypatch.setattr(Strip, "of", staticmethod(counted))
    cache = make_cache(8, (Paged(2, 4), ((0, 8),)))
    storage = parse_storage("hnd", 16, "bf16").with_pages(dict.fromkeys(cache.groups, 64))
    spec, prompt, ids = Spec(parse_layout("tp1"), cache, storage), Prompt(100), np.arange(7)
    found = plan(spec, spec)
    tables = Tables({0: dict.fromkeys(cache.groups, ids)}, {0: dict.fromkeys(cache.groups, ids[::-1])})
    groups = ((0, 8), (0, 5), (5, 7), (7, 8), (2, 3))
    for layers in groups:
        chunk = Chunk(layers, (0, 100))
        copies, num_bytes = direct_copies(found, prompt, tables, chunk, (0, 0)) or ([], {})
        assert sum(copy.spans.num_bytes for copy in copies) == sum(num_bytes.values())
        assert num_bytes == dict.fromkeys(("k", "v"), (layers[1] - layers[0]) * 100 * 2 * 4 * 2)
    assert made == [8, 8], "K and V, once for all groups"


def test_large_chunks_are_left_to_the_long_way() -> None:
    cache = make_cache(4, (Paged(2, 1), ((0, 4),)))
    storage = parse_storage("hnd", 1, "bf16").with_pages(dict.fromkeys(cache.groups, 4096))
    spec = Spec(parse_layout("tp1"), cache, storage)
    prompt, chunk = Prompt(SPANS_MAX // 4 + 1), Chunk((0, 4), (0, SPANS_MAX // 4 + 1))
    found = plan(spec, spec)
    ids = np.random.default_rng(1).permutation(4096)
    tables = Tables({0: dict.fromkeys(cache.groups, ids)}, {0: dict.fromkeys(cache.groups, ids[::-1])})
    assert direct_copies(found, prompt, tables, chunk, (0, 0)) is None
    fewer = Chunk((0, 2), (0, 8))
    assert direct_copies(found, prompt, tables, fewer, (0, 0)) is not None
    ranges = writable(found, prompt, tables.target, (0, 0), DIRECT)
    for copy in source_steps(parts_of(found, prompt, tables, chunk, (0, 0)), DIRECT):
        assert isinstance(copy, Copy)
        assert int(ranges[copy.target_buffer][1].sum()) == copy.spans.num_bytes


@FEWER
@given(worlds())
def test_writable_is_what_direct_copies_write_and_no_more(world: World) -> None:
    scene = Scene(world)
    target = scene.target()
    for pair in scene.some_pairs():
        mode = scene.mode(pair, is_packed=world.seed % 4 == 0)
        own = {key: buffer for key, buffer in target.items() if key[0] == pair[1]}
        tables = {pair[1]: scene.tables.target[pair[1]]}
        masks = {name: np.zeros(len(buffer), dtype=np.int64) for (_, name), buffer in own.items()}
        for name, (starts, lengths) in writable(scene.plan, scene.prompt, tables, pair, mode).items():
            assert (lengths > 0).all()
            assert (starts[1:] > starts[:-1] + lengths[:-1]).all(), "sorted, and neighbours are one"
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                masks[name][start : start + length] += 1
        steps = source_steps(scene.at_source(scene.whole, pair), mode)
        direct: list[Step] = [s for s in steps if isinstance(s, Copy) and s.target_buffer != STAGING]
        for (_, name), counts in count_writes(direct, own).items():
            np.testing.assert_array_equal(masks[name], counts)


def page_of_bytes(scene: Scene) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """By source buffer and group: the page that each byte belongs to, or -1."""
    found: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    for held in scene.held_by_source:
        component = held.component
        buffer = scene.source[held.rank, held.buffer]
        pages = found.setdefault((held.rank, held.buffer), {})
        mask = pages.setdefault(component.group, np.full(len(buffer), -1))
        slots = np.searchsorted(np.unique(held.tokens), held.tokens)
        entries = scene.world.source.storage.page_entries(component)
        ids = scene.tables.source[held.rank][component.group][slots // entries]
        mask[held.offsets[:, None] + np.arange(held.item_bytes)] = ids[:, None]
    return found


@FEWER
@given(worlds())
def test_pages_read(world: World) -> None:
    scene = Scene(world)
    pages = page_of_bytes(scene)
    for chunk in chunks_of(world, random.Random(world.seed)):
        steps = list(itertools.chain(*scene.bound(chunk, NEVER_PACK).values()))
        for rank, _ in scene.some_pairs():
            wanted: dict[str, set[int]] = {}
            for step in steps:
                if not isinstance(step, Copy) or step.source != rank:
                    continue
                read = bytes_of(step.spans.source, step.spans.length)
                for group, mask in pages[rank, step.source_buffer].items():
                    wanted.setdefault(group, set()).update(set(mask[read].tolist()) - {-1})
            own = scene.tables.source[rank]
            found = pages_read(scene.plan, scene.prompt, own, chunk, rank)
            assert {g: ids.tolist() for g, ids in found.items()} == {
                group: sorted(ids) for group, ids in wanted.items() if ids
            }


def bytes_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Every byte of some ranges, in their order."""
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return first + np.arange(lengths.sum())


def gathered(spans: Spans, buffer: np.ndarray) -> np.ndarray:
    found = np.full(spans.num_bytes, FILL, dtype=np.uint8)
    found[bytes_of(spans.target, spans.length)] = buffer[bytes_of(spans.source, spans.length)]
    return found


@FEWER
@given(worlds())
def test_canonical_order_is_layer_token_unit_channel_at_both_ends(world: World) -> None:
    scene = Scene(world)
    target = scene.target()
    held = {(h.rank, h.component.name): h for h in scene.held_by_source}
    for chunk in chunks_of(world, random.Random(world.seed)):
        bound = scene.bound(chunk, NEVER_PACK)
        for pair in scene.some_pairs():
            execute(bound[pair], scene.source, target)
            parts = scene.at_source(chunk, pair)
            found = canonical(parts, "source")
            assert {name: spans.num_bytes for name, (_, spans) in found.items()} == part_bytes(parts)
            theirs = canonical(scene.at_target(chunk, pair), "target")
            for name, (buffer, spans) in found.items():
                mine = held[pair[0], name]
                read = np.zeros(len(scene.source[pair[0], buffer]), dtype=bool)
                read[bytes_of(spans.source, spans.length)] = True
                # An identity counts through component, layer, token, unit and the dims inside, in this order.
                identities = np.sort(mine.identities[read[mine.offsets]])
                wanted = raw_values(identities, mine.item_bytes, world.seed).reshape(-1)
                np.testing.assert_array_equal(gathered(spans, scene.source[pair[0], buffer]), wanted)
                if not scene.is_converted(name):
                    landed = gathered(theirs[name][1], target[pair[1], theirs[name][0]])
                    np.testing.assert_array_equal(landed, wanted)


@FEWER
@given(worlds())
def test_places_in_staging_hold_components_in_canonical_order(world: World) -> None:
    scene = Scene(world)
    for chunk in chunks_of(world, random.Random(world.seed)):
        for pair in scene.some_pairs():
            mode = scene.mode(pair, is_packed=bool(world.seed % 2))
            parts = scene.at_source(chunk, pair)
            places = places_in_staging(scene.at_target(chunk, pair), mode)
            landed = np.full(max((stop for _, stop in places.values()), default=0), FILL, dtype=np.uint8)
            for step in source_steps(parts, mode):
                if isinstance(step, Pack) or (step.target_buffer == STAGING != step.source_buffer):
                    buffer = step.buffer if isinstance(step, Pack) else step.source_buffer
                    read = bytes_of(step.spans.source, step.spans.length)
                    landed[bytes_of(step.spans.target, step.spans.length)] = scene.source[pair[0], buffer][
                        read
                    ]
            names = {
                part.component.name
                for part in parts
                if mode == PACK or scene.is_converted(part.component.name)
            }
            assert set(places) == names
            for name, (start, stop) in places.items():
                buffer, spans = canonical(parts, "source")[name]
                wanted = gathered(spans, scene.source[pair[0], buffer])
                np.testing.assert_array_equal(landed[start:stop], wanted)


def made(cache, ends=("tp2", "tp1"), words=("hnd", "hnd"), dtypes=("bf16", "bf16"), page: int = 16) -> Plan:
    specs = []
    for layout, storage, dtype in zip(ends, words, dtypes, strict=True):
        kept = parse_storage(storage, page, dtype).with_pages({"tokens": 20, "state": 4})
        specs.append(Spec(parse_layout(layout), cache, kept))
    return plan(*specs)


GQA = make_cache(4, (Paged(4, 8), ((0, 4),)))
HYBRID = make_cache(4, (Paged(4, 8), ((0, 2),)), (Recurrent(4, 8, dtype="fp32"), ((1, 4),)))


def pages(spec: Spec, num_pages: int = 10) -> dict[int, dict[str, np.ndarray]]:
    tables = {"tokens": np.arange(num_pages, dtype=np.int64), "state": np.arange(1, dtype=np.int64)}
    return dict.fromkeys(range(spec.layout.num_ranks), tables)


def test_needs_of_a_hybrid() -> None:
    found = needs(made(HYBRID), Prompt(100, {"tokens": 32}))
    assert found == dict.fromkeys([(0, 0), (1, 0)], (Need((0, 2), 32), Need((2, 4), 99)))
    everything_held = needs(made(HYBRID, page=4), Prompt(100, {"tokens": 100}))
    assert everything_held == dict.fromkeys([(0, 0), (1, 0)], (Need((1, 4), 99),))
    assert needs(made(GQA, page=4), Prompt(100, {"tokens": 100})) == {}
    assert expected_bytes(made(GQA, page=4), Prompt(100, {"tokens": 100})) == {}
    assert modes(made(GQA, page=4), Prompt(100, {"tokens": 100}), PackCost()) == {}


def test_components_of_one_dtype_go_direct_beside_converted_ones() -> None:
    found = made(HYBRID, dtypes=("bf16", "fp32"))
    prompt, chunk = Prompt(100), Chunk((0, 4), (0, 100))
    tables = Tables(pages(found.source), pages(found.target))
    assert modes(found, prompt, NEVER_PACK)[0, 0] == Mode(CONVERT, 2 * 100 * 2 * 8 * 2 * 2)
    parts = parts_of(found, prompt, tables, chunk, (0, 0))
    copies = [s for s in source_steps(parts, CONVERT) if isinstance(s, Copy)]
    assert [(s.source_buffer, s.target_buffer) for s in copies] == [
        ("ssm", "ssm"), ("k", STAGING), ("v", STAGING)
    ]  # fmt: skip
    assert [(s.component, s.dtypes) for s in target_steps(parts, CONVERT)] == [
        ("k", ("bf16", "fp32")), ("v", ("bf16", "fp32"))
    ]  # fmt: skip
    assert list(writable(found, prompt, tables.target, (0, 0), CONVERT)) == ["ssm"]
    assert writable(found, prompt, tables.target, (0, 0), PACK) == {}
    assert set(places_in_staging(parts, CONVERT)) == {"k", "v"}
    assert set(places_in_staging(parts, PACK)) == {"k", "ssm", "v"}


def test_modes_that_cannot_be_are_refused() -> None:
    prompt, chunk = Prompt(100), Chunk((0, 4), (0, 100))
    unequal = made(GQA, dtypes=("bf16", "fp32"))
    tables = Tables(pages(unequal.source), pages(unequal.target))
    parts = parts_of(unequal, prompt, tables, chunk, (0, 0))
    for refused in (lambda: source_steps(parts, DIRECT), lambda: target_steps(parts, DIRECT)):
        with pytest.raises(ConfigError, match="k is bf16 at the source and fp32 at the target"):
            refused()
    with pytest.raises(ConfigError, match="cannot go direct"):
        writable(unequal, prompt, tables.target, (0, 0), DIRECT)
    with pytest.raises(ConfigError, match="unknown mode 'zip'"):
        staging_bytes(unequal, prompt, (0, 0), "zip")
    grains = made(GQA, words=("hnd.granule4", "hnd.granule4"))
    with pytest.raises(ConfigError, match="granules of 4 tokens"):
        target_steps(parts_of(grains, prompt, tables, chunk, (0, 0)), PACK)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk((0, 4), (0, 101)),
        Chunk((0, 4), (100, 100)),
        Chunk((0, 4), (-1, 10)),
        Chunk((0, 4), (20, 10)),
        Chunk((2, 2), (0, 10)),
        Chunk((-1, 2), (0, 10)),
    ],
)
def test_what_is_no_chunk_is_refused(chunk: Chunk) -> None:
    found = made(GQA)
    with pytest.raises(ConfigError, match="no chunk of a prompt of 100 tokens"):
        chunk_bytes(found, Prompt(100), chunk, (0, 0))


def test_pairs_and_layers_that_meet_nowhere_move_nothing() -> None:
    found = made(GQA, ends=("pp2", "pp2"))
    prompt = Prompt(100)
    tables = Tables(pages(found.source), pages(found.target))
    for pair, layers in (((0, 1), (0, 4)), ((5, 5), (0, 4)), ((0, 0), (2, 4)), ((0, 0), (70, 80))):
        parts = parts_of(found, prompt, tables, Chunk(layers, (0, 100)), pair)
        assert source_steps(parts, PACK) == target_steps(parts, PACK) == []
        assert chunk_bytes(found, prompt, Chunk(layers, (0, 100)), pair) == {}
    assert pages_read(found, prompt, tables.source[0], Chunk((2, 4), (0, 100)), 0) == {}


def test_tables_that_are_short_or_give_a_page_twice_are_refused() -> None:
    found = made(GQA)
    prompt = Prompt(100, {"tokens": 32})
    short = {"tokens": np.arange(6, dtype=np.int64)}
    with pytest.raises(ConfigError, match="group 'tokens' of source rank 1 has 6 pages, 7 are needed"):
        pages_read(found, prompt, short, Chunk((0, 4), (0, 100)), 1)
    parts = parts_of(found, prompt, Tables({0: short}, pages(found.target)), Chunk((0, 4), (0, 100)), (0, 0))
    with pytest.raises(ConfigError, match="source rank 0 has 6 pages"):
        source_steps(parts, DIRECT)
    assert pages_read(found, prompt, short, Chunk((0, 4), (0, 96)), 1)["tokens"].tolist() == [2, 3, 4, 5]
    with pytest.raises(ConfigError, match="target rank 0 has 6 pages"):
        check_pages(found, prompt, short, 0)
    with pytest.raises(ConfigError, match="no page table for group 'tokens' of target rank 0"):
        check_pages(found, prompt, {}, 0)
    twice = {"tokens": np.array([0, 0, 1, 2, 3, 2, 4], dtype=np.int64)}
    with pytest.raises(ConfigError, match="gives page 2 to two places"):
        check_pages(found, prompt, twice, 0)
    # What is held is not written, so it may lie anywhere.
    check_pages(found, prompt, {"tokens": np.array([0, 0, 1, 2, 3, 5, 4], dtype=np.int64)}, 0)


def test_a_page_table_that_changes_in_place_is_seen() -> None:
    """What is kept between chunks is kept for these pages, not for this array."""
    found = made(make_cache(2, (Latent(8), ((0, 2),))), ends=("tp1", "tp1"))
    prompt = Prompt(32)
    tables = Tables(pages(found.source), pages(found.target))
    lengths = []
    for _ in range(2):
        parts = parts_of(found, prompt, tables, Chunk((0, 2), (0, 32)), (0, 0))
        lengths.append(next(iter(source_steps(parts, DIRECT))).spans.length.tolist())
        tables.source[0]["tokens"][:2] = [5, 3]
    assert [len(length) for length in lengths] == [2, 4]


def test_groups_of_one_extent_are_held_apart() -> None:
    plain = GQA.components
    cache = Cache(4, (plain[0], replace(plain[1], group="values")))
    storage = parse_storage("hnd", 16, "bf16").with_pages({"tokens": 20, "values": 20})
    spec = Spec(parse_layout("tp1"), cache, storage)
    prompt = Prompt(96, {"tokens": 32, "values": 64})
    entry = 4 * 4 * 8 * 2
    assert expected_bytes(plan(spec, spec), prompt) == {(0, 0): {"k": 64 * entry, "v": 32 * entry}}
    assert needs(plan(spec, spec), prompt) == {(0, 0): (Need((0, 4), 32),)}
    tables = {group: np.arange(6, dtype=np.int64) for group in ("tokens", "values")}
    found = pages_read(plan(spec, spec), prompt, tables, Chunk((0, 4), (0, 96)), 0)
    assert {group: ids.tolist() for group, ids in found.items()} == {"tokens": [2, 3, 4, 5], "values": [4, 5]}
