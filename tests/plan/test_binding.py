"""Binding: what one chunk's steps are, what each end works out alone, and what a transfer settles before."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.scene import (
    FILL,
    GQA,
    HYBRID,
    Scene,
    bytes_of,
    chunks_of,
    count_writes,
    gathered,
    made,
    padded,
    pages,
    plain,
)
from tests.plan.world import World, make_cache, needed, raw_values, worlds

from baton.errors import ConfigError
from baton.plan import chunks
from baton.plan.binding import (
    Mode,
    PairNeed,
    TransferTerms,
    bind,
    bind_source,
    bind_target,
    check_pages,
    expected_bytes,
    modes,
    needs,
    pages_read,
    staging_bytes,
    writable,
)
from baton.plan.cache import Cache
from baton.plan.chunks import SMALL_SPANS_MAX, Tables, bound_plan
from baton.plan.content import execute
from baton.plan.kinds import Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.lowering import LayerEnd, SpanTemplate
from baton.plan.ownership import END, Spec
from baton.plan.planner import plan
from baton.plan.report import Report, pages_needed
from baton.plan.routes import Chunk, Plan, Prompt, resolve
from baton.plan.steps import (
    ALWAYS_PACK,
    CONVERT,
    DIRECT,
    NEVER_PACK,
    PACK,
    STAGING,
    Copy,
    Pack,
    PackCost,
    Step,
    Unpack,
    copy_lengths,
)
from baton.plan.storage import parse_storage
from baton.plan.tokens import Runs, set_runs

FEWER = settings(max_examples=max(1, settings().max_examples // 4))
"""Each example here looks at many chunks and pairs, by many tests."""
WIDE = make_cache(4, (Paged(4, 64), ((0, 4),)))


def pair(
    cache, ends: tuple[str, str], words: tuple[str, str], prompt: Prompt, dtypes=("bf16", "bf16")
) -> Plan:
    specs = []
    for layout, storage, dtype in zip(ends, words, dtypes, strict=True):
        bare = Spec(parse_layout(layout), cache, parse_storage(storage, 64, dtype))
        specs.append(Spec(bare.layout, cache, bare.storage.with_pages(pages_needed(bare, prompt))))
    return plan(*specs)


def report(ends: tuple[str, str], words: tuple[str, str], tokens: int, cost: PackCost) -> Report:
    prompt = Prompt(tokens)
    return Report("gqa", pair(WIDE, ends, words, prompt), prompt, cost)


def tables_of(made: Plan, *, contiguous: bool) -> Tables:
    step = 1 if contiguous else 2
    sides = []
    for spec in (made.source, made.target):
        pages = {g: np.arange(0, spec.storage.pages_of(g), step, dtype=np.int64) for g in spec.cache.groups}
        sides.append(dict.fromkeys(range(spec.layout.num_ranks), pages))
    return Tables(*sides)


@pytest.mark.parametrize(
    ("ends", "words", "copies"),
    [
        # In a full page both heads of a source rank lie side by side at both ends; a part goes head by head.
        (("tp2", "cp2:stripe64.tp1"), ("hnd", "hnd"), {16384: 48, 1024: 32}),
        (("tp1", "tp1"), ("hnd", "hnd"), {32768: 24, 1024: 32}),
        (("tp1", "tp1"), ("nhd", "nhd"), {32768: 24, 4096: 8}),
        # Fused: K and V of a page are one copy; page-major: all layers of it.
        (("tp1", "tp1"), ("hnd.fused", "hnd.fused"), {65536: 12, 1024: 32}),
        (("tp1", "tp1"), ("nhd.page", "nhd.page"), {131072: 6, 4096: 8}),
        (("tp1", "tp1"), ("nhd.page.fused", "nhd.page.fused"), {262144: 3, 4096: 8}),
        # Tokens of one head are scattered in NHD: one copy per token, layer, tensor and pair.
        (("tp2", "tp1"), ("nhd", "nhd"), {256: 200 * 4 * 2 * 2}),
        (("tp1", "tp1"), ("hnd", "nhd"), {128: 200 * 4 * 2 * 4}),
        (("tp1", "cp4:stripe1"), ("hnd", "hnd"), {128: 200 * 4 * 2 * 4}),
    ],
)
def test_copies(ends: tuple[str, str], words: tuple[str, str], copies: dict[int, int]) -> None:
    assert report(ends, words, 200, NEVER_PACK).copy_sizes == dict(sorted(copies.items()))


def test_neighbouring_pages_become_one_copy() -> None:
    prompt, whole = Prompt(256), Chunk((0, END), (0, 256))
    made = pair(make_cache(3, (Latent(8), ((0, 3),))), ("tp1", "tp1"), ("hnd", "hnd"), prompt)
    scattered = copy_lengths(bind(made, prompt, tables_of(made, contiguous=False), whole, NEVER_PACK))
    in_order = copy_lengths(bind(made, prompt, tables_of(made, contiguous=True), whole, NEVER_PACK))
    assert (len(scattered), len(in_order)) == (12, 3)
    full = Spec(made.source.layout, made.source.cache, made.source.storage.with_pages({"tokens": 4}))
    tight = plan(full, full)
    everything = bind(tight, prompt, tables_of(tight, contiguous=True), whole, NEVER_PACK)
    assert copy_lengths(everything).tolist() == [3 * 256 * 16], "full pools in order are one copy"


def test_packing_is_chosen_by_cost() -> None:
    ends, words = ("tp2", "tp1"), ("nhd", "nhd")
    many = report(ends, words, 8192, PackCost())
    assert (many.num_copies, many.packed_pairs) == (2, [(0, 0), (1, 0)])
    assert many.num_direct_copies == 8192 * 4 * 2 * 2
    few = report(ends, words, 2, PackCost())
    assert few.packed_pairs == []
    large = report(("tp2", "tp1"), ("hnd", "hnd"), 8192, PackCost())
    assert large.packed_pairs == []
    slow_gather = report(ends, words, 8192, PackCost(pack_bytes_per_s=1e8))
    assert slow_gather.packed_pairs == []


def steps_of(dtypes: tuple[str, str], cost: PackCost) -> list[Step]:
    prompt = Prompt(100)
    made = pair(WIDE, ("tp2", "tp1"), ("hnd", "nhd"), prompt, dtypes)
    return bind(made, prompt, tables_of(made, contiguous=False), Chunk((0, 4), (0, 100)), cost)


def test_kinds_of_steps() -> None:
    assert {type(step) for step in steps_of(("bf16", "bf16"), NEVER_PACK)} == {Copy}
    packed = steps_of(("bf16", "bf16"), ALWAYS_PACK)
    assert [type(step) for step in packed[:5]] == [Pack, Pack, Copy, Unpack, Unpack]
    converted = steps_of(("bf16", "fp32"), NEVER_PACK)
    assert [type(step) for step in converted[:4]] == [Copy, Copy, Unpack, Unpack]
    assert {step.target_buffer for step in converted if isinstance(step, Copy)} == {STAGING}
    assert {step.dtypes for step in converted if isinstance(step, Unpack)} == {("bf16", "fp32")}


def test_state_goes_with_the_chunk_that_ends_the_prompt() -> None:
    cache = make_cache(4, (Paged(2, 8), ((0, 2),)), (Recurrent(2, 8), ((2, 4),)))
    prompt = Prompt(100)
    made = pair(cache, ("tp1", "tp1"), ("hnd", "hnd"), prompt)
    tables = tables_of(made, contiguous=True)

    def buffers(chunk: Chunk) -> set[str]:
        return {step.source_buffer for step in bind(made, prompt, tables, chunk) if isinstance(step, Copy)}

    assert buffers(Chunk((0, 4), (0, 99))) == {"k", "v"}
    assert buffers(Chunk((0, 4), (99, 100))) == {"k", "v", "ssm"}
    assert buffers(Chunk((2, 4), (0, 100))) == {"ssm"}
    assert buffers(Chunk((1, 2), (0, 100))) == {"k", "v"}


def test_a_missing_page_table_is_named() -> None:
    prompt = Prompt(100)
    made = pair(WIDE, ("tp2", "tp1"), ("hnd", "hnd"), prompt)
    tables = tables_of(made, contiguous=True)
    with pytest.raises(ConfigError, match="group 'tokens' of target rank 0"):
        bind(made, prompt, Tables(tables.source, {}), Chunk((0, 4), (0, 100)))


@pytest.mark.parametrize(
    "held", [{"tokens": 65}, {"tokens": -64}, {"tokens": 128}, {"state": 64}, {"other": 0}]
)
def test_bad_prefixes_are_refused(held: dict[str, int]) -> None:
    prompt = Prompt(100, held)
    made = pair(WIDE, ("tp2", "tp1"), ("hnd", "hnd"), Prompt(100))
    with pytest.raises(ConfigError):
        bind(made, prompt, tables_of(made, contiguous=True), Chunk((0, 4), (0, 100)))


@settings(max_examples=max(1, settings().max_examples // 2))
@given(worlds())
def test_a_preview_counts_what_binding_every_pair_gives(world: World) -> None:
    """Pairs that are called alike bind to copies of the same sizes."""
    sides = []
    for spec in (world.source, world.target):
        # Declared memory has the pages that it has.
        pages = {} if spec.storage.placements else pages_needed(spec, world.prompt)
        sides.append(replace(spec, storage=spec.storage.with_pages(pages)) if pages else spec)
    made = plan(*sides, world.source_dp, world.target_dp)
    preview = Report("", made, world.prompt, PackCost(span_s=1e-5))
    whole = Chunk((0, END), (0, world.prompt.num_tokens))
    tables = []
    for spec in sides:
        pages = {group: np.arange(0, count, 2) for group, count in pages_needed(spec, world.prompt).items()}
        tables.append(dict.fromkeys(range(spec.layout.num_ranks), pages))
    steps = bind(made, world.prompt, Tables(*tables), whole, preview.cost)
    sizes, counts = np.unique(copy_lengths(steps), return_counts=True)
    assert preview.copy_sizes == dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    assert sum(size * count for size, count in preview.copy_sizes.items()) == sum(preview.bytes_by_source)


@FEWER
@given(worlds())
def test_a_target_needs_its_own_tables_alone(world: World) -> None:
    """The steps of a pair are those of its source followed by those of its target."""
    scene = Scene(world)
    is_packed = bool(world.seed % 2)
    terms = scene.terms(is_packed=is_packed)
    for chunk in chunks_of(world, random.Random(world.seed)):
        for pair, steps in scene.bound(chunk, ALWAYS_PACK if is_packed else NEVER_PACK).items():
            send, receive = scene.send(terms, chunk, pair), scene.receive(terms, chunk, pair)
            mine = [] if send is None else [*send.packs, *send.copies]
            assert [plain(step) for step in (*mine, *receive.unpacks)] == [plain(step) for step in steps]


@FEWER
@given(worlds())
def test_modes_follow_the_whole_prompt_and_staging_holds_any_cut(world: World) -> None:
    scene = Scene(world)
    cost = [NEVER_PACK, ALWAYS_PACK, PackCost(span_s=2e-6)][world.seed % 3]
    found = modes(scene.plan, scene.prompt, cost)
    assert set(found) == set(expected_bytes(scene.plan, scene.prompt)) == set(needs(scene.plan, scene.prompt))
    chunks = chunks_of(world, random.Random(world.seed))
    bound = scene.bound(scene.whole, cost)
    terms = TransferTerms(scene.plan, scene.prompt, {}, {pair: mode.mode for pair, mode in found.items()})
    for pair, chosen in found.items():
        kinds = {type(step) for step in bound[pair]}
        assert chosen.mode == (PACK if Pack in kinds else scene.plain(pair))
        used = sum(scene.receive(terms, chunk, pair).staging_bytes for chunk in chunks)
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
            for name, num_bytes in scene.moved(chunk, pair).num_bytes.items():
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
            sizes = scene.moved(chunk, pair).num_bytes
            copies = [step for step in bound[pair] if isinstance(step, Copy)]
            assert sum(sizes.values()) == sum(step.spans.num_bytes for step in copies)


@FEWER
@given(worlds())
def test_small_and_large_chunks_bind_alike(world: World) -> None:
    """Templates are filled in for two sets of page tables: what they keep may not depend on the first."""
    scene, other = Scene(world), Scene(replace(world, seed=world.seed + 1))
    for chunk in chunks_of(world, random.Random(world.seed)):
        for pair in scene.some_pairs():
            for tables in (scene.tables, other.tables):
                copies = []
                for limit in (0, 1 << 20):
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(chunks, "SMALL_SPANS_MAX", limit)
                        moved = chunks.BoundPlan(scene.plan, scene.prompt).chunk(pair, chunk)
                        copies.append([plain(step) for step in moved.copies(tables, scene.plain(pair))])
                assert copies[0] == copies[1]
                kept = scene.moved(chunk, pair).copies(tables, scene.plain(pair))
                assert [plain(step) for step in kept] == copies[0]


def test_groups_of_layers_share_one_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine cuts is another place each time; finding the spans of its tokens anew would cost."""
    num_made = 0
    make_template = chunks.make_template

    def counted(source: LayerEnd, target: LayerEnd, extents: tuple[int, ...], runs: Runs) -> SpanTemplate:
        nonlocal num_made
        num_made += 1
        return make_template(source, target, extents, runs)

    monkeypatch.setattr(chunks, "make_template", counted)
    cache = make_cache(8, (Paged(2, 4), ((0, 8),)))
    storage = parse_storage("hnd", 16, "bf16").with_pages(dict.fromkeys(cache.groups, 64))
    spec, prompt, ids = Spec(parse_layout("tp1"), cache, storage), Prompt(100), np.arange(7)
    found = plan(spec, spec)
    tables = ({"tokens": ids}, {0: {"tokens": ids[::-1]}})
    terms = TransferTerms(found, prompt, tables[1], {(0, 0): DIRECT})
    for layers in ((0, 8), (0, 5), (5, 7), (7, 8), (2, 3)):
        (send,) = bind_source(terms, 0, tables[0], Chunk(layers, (0, 100)))
        assert sum(copy.spans.num_bytes for copy in send.copies) == sum(send.num_bytes.values())
        assert send.num_bytes == dict.fromkeys(("k", "v"), (layers[1] - layers[0]) * 100 * 2 * 4 * 2)
    assert num_made == 1, "of one layer, for K and V and all groups"


def test_a_large_chunk_writes_what_is_writable() -> None:
    cache = make_cache(4, (Paged(2, 1), ((0, 4),)))
    storage = parse_storage("hnd", 1, "bf16").with_pages(dict.fromkeys(cache.groups, 4096))
    spec = Spec(parse_layout("tp1"), cache, storage)
    num_tokens = 2 * SMALL_SPANS_MAX
    found, ids = plan(spec, spec), np.random.default_rng(1).permutation(4096)
    terms = TransferTerms(found, Prompt(num_tokens), {0: {"tokens": ids[::-1]}}, {(0, 0): DIRECT})
    (send,) = bind_source(terms, 0, {"tokens": ids}, Chunk((0, 4), (0, num_tokens)))
    ranges = writable(terms, 0, 0)
    for copy in send.copies:
        assert int(ranges[copy.target_buffer][1].sum()) == copy.spans.num_bytes


@FEWER
@given(worlds())
def test_writable_is_what_direct_copies_write_and_no_more(world: World) -> None:
    scene = Scene(world)
    target = scene.target()
    for pair in scene.some_pairs():
        terms = scene.terms(is_packed=world.seed % 4 == 0)
        own = {key: buffer for key, buffer in target.items() if key[0] == pair[1]}
        alone = replace(terms, tables={pair[1]: scene.tables.target[pair[1]]})
        masks = {name: np.zeros(len(buffer), dtype=np.int64) for (_, name), buffer in own.items()}
        for name, (starts, lengths) in writable(alone, *pair).items():
            assert (lengths > 0).all()
            assert (starts[1:] > starts[:-1] + lengths[:-1]).all(), "sorted, and neighbours are one"
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                masks[name][start : start + length] += 1
        send = scene.send(terms, scene.whole, pair)
        direct: list[Step] = [s for s in (send.copies if send else ()) if s.target_buffer != STAGING]
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


@FEWER
@given(worlds())
def test_canonical_order_is_layer_token_unit_channel_at_both_ends(world: World) -> None:
    scene = Scene(world)
    target, terms = scene.target(), scene.terms(is_verified=True)
    held = {(h.rank, h.component.name): h for h in scene.held_by_source}
    for chunk in chunks_of(world, random.Random(world.seed)):
        bound = scene.bound(chunk, NEVER_PACK)
        for pair in scene.some_pairs():
            execute(bound[pair], scene.source, target)
            send, theirs = scene.send(terms, chunk, pair), scene.receive(terms, chunk, pair).sums
            found = send.sums if send else {}
            assert {name: spans.num_bytes for name, (_, spans) in found.items()} == (
                send.num_bytes if send else {}
            )
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
def test_staging_holds_components_in_canonical_order(world: World) -> None:
    scene = Scene(world)
    is_packed = bool(world.seed % 2)
    terms = scene.terms(is_packed=is_packed, is_verified=True)
    for chunk in chunks_of(world, random.Random(world.seed)):
        for pair in scene.some_pairs():
            send, receive = scene.send(terms, chunk, pair), scene.receive(terms, chunk, pair)
            if send is None:
                assert receive.num_bytes == {}
                continue
            landed = np.full(receive.staging_bytes, FILL, dtype=np.uint8)
            gathering = [(step.buffer, step.spans) for step in send.packs]
            gathering += [
                (step.source_buffer, step.spans)
                for step in send.copies
                if step.target_buffer == STAGING != step.source_buffer
            ]
            for buffer, spans in gathering:
                read = bytes_of(spans.source, spans.length)
                landed[bytes_of(spans.target, spans.length)] = scene.source[pair[0], buffer][read]
            staged = {name: spans for name, (buffer, spans) in receive.sums.items() if buffer == STAGING}
            assert set(staged) == {
                name for name in send.num_bytes if terms.modes[pair] == PACK or scene.is_converted(name)
            }
            for name, spans in staged.items():
                buffer, wanted = send.sums[name]
                np.testing.assert_array_equal(
                    gathered(spans, landed), gathered(wanted, scene.source[pair[0], buffer])
                )


def test_needs_of_a_hybrid() -> None:
    found = needs(made(HYBRID), Prompt(100, {"tokens": 32}))
    assert found == dict.fromkeys([(0, 0), (1, 0)], (PairNeed((0, 2), 32), PairNeed((2, 4), 99)))
    everything_held = needs(made(HYBRID, page=4), Prompt(100, {"tokens": 100}))
    assert everything_held == dict.fromkeys([(0, 0), (1, 0)], (PairNeed((1, 4), 99),))
    assert needs(made(GQA, page=4), Prompt(100, {"tokens": 100})) == {}
    assert expected_bytes(made(GQA, page=4), Prompt(100, {"tokens": 100})) == {}
    assert modes(made(GQA, page=4), Prompt(100, {"tokens": 100}), PackCost()) == {}


def test_components_of_one_dtype_go_direct_beside_converted_ones() -> None:
    found = made(HYBRID, dtypes=("bf16", "fp32"))
    prompt, chunk = Prompt(100), Chunk((0, 4), (0, 100))
    tables = Tables(pages(found.source), pages(found.target))
    assert modes(found, prompt, NEVER_PACK)[0, 0] == Mode(CONVERT, 2 * 100 * 2 * 8 * 2 * 2)
    chosen = dict.fromkeys([(0, 0), (1, 0)], CONVERT)
    terms = TransferTerms(found, prompt, tables.target, chosen, is_verified=True)
    send = bind_source(terms, 0, tables.source[0], chunk)[0]
    assert [(s.source_buffer, s.target_buffer) for s in send.copies] == [
        ("ssm", "ssm"), ("k", STAGING), ("v", STAGING)
    ]  # fmt: skip
    receive = bind_target(terms, 0, 0, chunk)
    assert [(s.component, s.dtypes) for s in receive.unpacks] == [
        ("k", ("bf16", "fp32")), ("v", ("bf16", "fp32"))
    ]  # fmt: skip
    assert list(writable(terms, 0, 0)) == ["ssm"]
    assert {name: buffer for name, (buffer, _) in receive.sums.items()} == {
        "k": STAGING, "v": STAGING, "ssm": "ssm"
    }  # fmt: skip
    packed = replace(terms, modes={(0, 0): PACK})
    assert writable(packed, 0, 0) == {}
    assert {buffer for buffer, _ in bind_target(packed, 0, 0, chunk).sums.values()} == {STAGING}


def test_modes_that_cannot_be_are_refused() -> None:
    prompt, chunk = Prompt(100), Chunk((0, 4), (0, 100))
    unequal = made(GQA, dtypes=("bf16", "fp32"))
    tables = Tables(pages(unequal.source), pages(unequal.target))
    terms = TransferTerms(unequal, prompt, tables.target, dict.fromkeys([(0, 0), (1, 0)], DIRECT))
    for refused in (
        lambda: bind_source(terms, 0, tables.source[0], chunk),
        lambda: bind_target(terms, 0, 0, chunk),
    ):
        with pytest.raises(ConfigError, match="k is bf16 at the source and fp32 at the target"):
            refused()
    with pytest.raises(ConfigError, match="cannot go direct"):
        writable(terms, 0, 0)
    with pytest.raises(ConfigError, match="unknown mode 'zip'"):
        staging_bytes(unequal, prompt, (0, 0), "zip")
    grains = made(GQA, words=("hnd.granule4", "hnd.granule4"))
    with pytest.raises(ConfigError, match="granules of 4 tokens"):
        bind_target(TransferTerms(grains, prompt, tables.target, {(0, 0): PACK}), 0, 0, chunk)


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
        bound_plan(found, Prompt(100)).chunk((0, 0), chunk)


def test_pairs_and_layers_that_meet_nowhere_move_nothing() -> None:
    found = made(GQA, ends=("pp2", "pp2"))
    prompt = Prompt(100)
    tables = Tables(pages(found.source), pages(found.target))
    bound = bound_plan(found, prompt)
    for pair, layers in (((0, 1), (0, 4)), ((5, 5), (0, 4)), ((0, 0), (2, 4)), ((0, 0), (70, 80))):
        assert bound.chunk(pair, Chunk(layers, (0, 100))).parts == ()
    terms = TransferTerms(found, prompt, tables.target, {})
    assert bind_source(terms, 0, tables.source[0], Chunk((2, 4), (0, 100))) == []
    assert bind_source(terms, 5, tables.source[0], Chunk((0, 4), (0, 100))) == []
    assert bind_target(terms, 0, 1, Chunk((0, 4), (0, 100))).num_bytes == {}
    assert pages_read(found, prompt, tables.source[0], Chunk((2, 4), (0, 100)), 0) == {}


def test_tables_that_are_short_or_give_a_page_twice_are_refused() -> None:
    found = made(GQA)
    prompt = Prompt(100, {"tokens": 32})
    short = {"tokens": np.arange(6, dtype=np.int64)}
    with pytest.raises(ConfigError, match="group 'tokens' of source rank 1 has 6 pages, 7 are needed"):
        pages_read(found, prompt, short, Chunk((0, 4), (0, 100)), 1)
    terms = TransferTerms(found, prompt, pages(found.target), {(0, 0): DIRECT})
    with pytest.raises(ConfigError, match="source rank 0 has 6 pages"):
        bind_source(terms, 0, short, Chunk((0, 4), (0, 100)))
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
    terms, lengths = TransferTerms(found, prompt, tables.target, {(0, 0): DIRECT}), []
    for _ in range(2):
        (send,) = bind_source(terms, 0, tables.source[0], Chunk((0, 2), (0, 32)))
        lengths.append(send.copies[0].spans.length.tolist())
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
    assert needs(plan(spec, spec), prompt) == {(0, 0): (PairNeed((0, 4), 32),)}
    tables = {group: np.arange(6, dtype=np.int64) for group in ("tokens", "values")}
    found = pages_read(plan(spec, spec), prompt, tables, Chunk((0, 4), (0, 96)), 0)
    assert {group: ids.tolist() for group, ids in found.items()} == {"tokens": [2, 3, 4, 5], "values": [4, 5]}
