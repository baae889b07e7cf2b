"""Binding: how many copies come out, when packing is chosen, and what a chunk carries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from tests.plan.world import World, make_cache, worlds

from baton.errors import ConfigError
from baton.plan.binding import Tables, bind
from baton.plan.kinds import Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import END, Spec
from baton.plan.packing import ALWAYS_PACK, NEVER_PACK, PackCost
from baton.plan.planner import plan
from baton.plan.prompt import Chunk, Prompt
from baton.plan.report import Report, pages_needed
from baton.plan.routes import Plan
from baton.plan.steps import STAGING, Copy, Pack, Step, Unpack, copy_lengths
from baton.plan.storage import parse_storage

GQA = make_cache(4, (Paged(4, 64), ((0, 4),)))


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
    return Report("gqa", pair(GQA, ends, words, prompt), prompt, cost)


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
    made = pair(GQA, ("tp2", "tp1"), ("hnd", "nhd"), prompt, dtypes)
    return bind(made, prompt, tables_of(made, contiguous=False), Chunk((0, 4), (0, 100)), cost)


def test_kinds_of_steps() -> None:
    assert {type(step) for step in steps_of(("bf16", "bf16"), NEVER_PACK)} == {Copy}
    packed = steps_of(("bf16", "bf16"), ALWAYS_PACK)
    assert [type(step) for step in packed[:5]] == [Pack, Pack, Copy, Unpack, Unpack]
    converted = steps_of(("bf16", "fp32"), NEVER_PACK)
    assert [type(step) for step in converted[:4]] == [Copy, Unpack, Copy, Unpack]
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
    made = pair(GQA, ("tp2", "tp1"), ("hnd", "hnd"), prompt)
    tables = tables_of(made, contiguous=True)
    with pytest.raises(ConfigError, match="group 'tokens' of target rank 0"):
        bind(made, prompt, Tables(tables.source, {}), Chunk((0, 4), (0, 100)))


@pytest.mark.parametrize(
    "held", [{"tokens": 65}, {"tokens": -64}, {"tokens": 128}, {"state": 64}, {"other": 0}]
)
def test_bad_prefixes_are_refused(held: dict[str, int]) -> None:
    prompt = Prompt(100, held)
    made = pair(GQA, ("tp2", "tp1"), ("hnd", "hnd"), Prompt(100))
    with pytest.raises(ConfigError):
        bind(made, prompt, tables_of(made, contiguous=True), Chunk((0, 4), (0, 100)))


@settings(max_examples=max(1, settings().max_examples // 2))
@given(worlds())
def test_a_preview_counts_what_binding_every_pair_gives(world: World) -> None:
    """Pairs that are called alike bind to copies of the same sizes."""
    sides = []
    for spec in (world.source, world.target):
        sides.append(Spec(spec.layout, spec.cache, spec.storage.with_pages(pages_needed(spec, world.prompt))))
    made = plan(*sides, world.source_dp, world.target_dp)
    preview = Report("", made, world.prompt, PackCost(span_s=1e-5))
    whole = Chunk((0, END), (0, world.prompt.num_tokens))
    steps = bind(made, world.prompt, tables_of(made, contiguous=False), whole, preview.cost)
    sizes, counts = np.unique(copy_lengths(steps), return_counts=True)
    assert preview.copy_sizes == dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    assert sum(size * count for size, count in preview.copy_sizes.items()) == sum(preview.bytes_by_source)
