"""Random hand-overs carried out on numpy buffers: every target byte right, written once, nothing else
touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests.plan.scene import FILL, chunks_of, count_writes, padded
from tests.plan.world import (
    World,
    holdings,
    make_cache,
    needed,
    page_tables,
    put,
    raw_values,
    worlds,
)

from baton.errors import ConfigError
from baton.plan import chunks
from baton.plan.binding import bind
from baton.plan.checker import check
from baton.plan.chunks import PageTables, RouteEnd, Tables
from baton.plan.content import Memory, allocate, execute
from baton.plan.dtypes import convert
from baton.plan.kinds import Paged
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec, by_layer
from baton.plan.planner import plan
from baton.plan.routes import Prompt, resolve
from baton.plan.steps import ALWAYS_PACK, NEVER_PACK, Copy, PackCost, Step
from baton.plan.storage import DeclaredPlacement, Placement, Storage
from baton.sim.families import draw_placements

NUM_PARTS = 8
"""So that several processes share the search."""


def expected_image(world: World, tables, untouched: Memory) -> tuple[Memory, Memory, int]:
    """Target buffers as they must be, how often each byte may be written, and the least that must travel."""
    image = {key: buffer.copy() for key, buffer in untouched.items()}
    writes = {key: np.zeros(len(buffer), dtype=np.uint8) for key, buffer in untouched.items()}
    granule, least = world.source.storage.granule, 0
    for held in holdings(world.target, world.target_dp, padded(world.prompt, granule), tables, "target"):
        keep = needed(held.component, world.prompt, granule, held.tokens)
        given_dtype = world.source.storage.dtype_of(held.component)
        wanted_dtype = world.target.storage.dtype_of(held.component)
        item = {"fp32": 4, "fp8": 1}.get(given_dtype, 2)
        values = np.ascontiguousarray(raw_values(held.identities[keep], item, world.seed))
        least += values.size
        values = convert(values.reshape(-1), given_dtype, wanted_dtype).reshape(-1, held.item_bytes)
        put(image[held.rank, held.buffer], held.offsets[keep], values)
        put(writes[held.rank, held.buffer], held.offsets[keep], np.ones_like(values))
    return image, writes, least


def assert_merged(steps: list[Step]) -> None:
    """No two spans of a copy are neighbours at both ends."""
    for step in steps:
        if isinstance(step, Copy):
            ends = set(
                zip(
                    (step.spans.source + step.spans.length).tolist(),
                    (step.spans.target + step.spans.length).tolist(),
                    strict=True,
                )
            )
            starts = set(zip(step.spans.source.tolist(), step.spans.target.tolist(), strict=True))
            assert not ends & starts
            assert {a.dtype for a in (step.spans.source, step.spans.target, step.spans.length)} == {
                np.dtype(np.int64)
            }


@contextmanager
def small_chunks_up_to(num_spans: int) -> Iterator[None]:
    """Chunks of these worlds are small; with 0 they are bound like large ones."""
    usual, chunks.SMALL_SPANS_MAX = chunks.SMALL_SPANS_MAX, num_spans
    chunks._bound_plan.cache_clear()
    try:
        yield
    finally:
        chunks.SMALL_SPANS_MAX = usual
        chunks._bound_plan.cache_clear()


def hand_off(world: World, cost: PackCost, by_layer_at: str = "") -> None:
    """Plans, binds and executes one world chunk by chunk and compares every byte of the target.

    `by_layer_at` is the side that declares a component for each layer, if any.
    """
    rng = np.random.default_rng(world.seed)
    granule = world.source.storage.granule
    tables = Tables(
        page_tables(world.source, world.source_dp, rng), page_tables(world.target, world.target_dp, rng)
    )
    source = allocate(world.source, world.source_dp, "source", 0x5A)
    target = allocate(world.target, world.target_dp, "target", FILL)
    for held in holdings(
        world.source, world.source_dp, padded(world.prompt, granule), tables.source, "source"
    ):
        put(
            source[held.rank, held.buffer],
            held.offsets,
            raw_values(held.identities, held.item_bytes, world.seed),
        )
    image, writes, least = expected_image(world, tables.target, target)
    try:
        ends = [
            by_layer(spec, side) if side == by_layer_at else spec
            for spec, side in ((world.source, "source"), (world.target, "target"))
        ]
        found = plan(*ends, world.source_dp, world.target_dp)
    except ConfigError as error:
        # A page of an odd size has elements where they cannot be declared.
        if not by_layer_at or "not a multiple of elements" not in str(error):
            raise
        found = plan(world.source, world.target, world.source_dp, world.target_dp)
    check(found, world.prompt, resolve(found, world.prompt))
    steps: list[Step] = []
    for chunk in chunks_of(world, random.Random(world.seed)):
        bound = bind(found, world.prompt, tables, chunk, cost)
        execute(bound, source, target)
        assert_merged(bound)
        steps.extend(bound)
    for key, buffer in target.items():
        np.testing.assert_array_equal(buffer, image[key], err_msg=str(key))
    for key, counts in count_writes(steps, target).items():
        np.testing.assert_array_equal(counts, writes[key], err_msg=f"writes to {key}")
    assert sum(step.spans.num_bytes for step in steps if isinstance(step, Copy)) == least


def overlaid_world(seed: int) -> World:
    """A window beside full attention, in declared memory on both sides, often in the same bytes."""
    cache = make_cache(4, (Paged(2, 3), ((0, 2),)), (Paged(2, 3, 0, 9), ((2, 4),)))
    rng = random.Random(seed)
    storage = Storage(4, "bf16").with_pages(dict.fromkeys(cache.groups, 7))
    specs = [draw_placements(rng, Spec(parse_layout(text), cache, storage)) for text in ("tp2", "pp2")]
    return World(*specs, 0, 0, Prompt(25), seed)


def ignore_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Placement.layer_starts
    monkeypatch.setattr(Placement, "layer_starts", lambda at, layers: right(replace(at, offset=0), layers))


def take_layers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Placement.layer_starts

    def ascending(at: Placement, layers: np.ndarray) -> np.ndarray:
        return right(replace(at, layer_offsets=tuple(sorted(at.layer_offsets))), layers)

    monkeypatch.setattr(Placement, "layer_starts", ascending)


def write_under_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RouteEnd.table

    def of_another(end: RouteEnd, tables: PageTables, num_pages: int) -> np.ndarray:
        if end.side == "target" and end.group == "tokens.w9":
            end = replace(end, group="tokens")
        return right(end, tables, num_pages)

    monkeypatch.setattr(RouteEnd, "table", of_another)


def begin_every_layer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong where a component is declared by layer alone: then each layer has an offset, and no stride."""
    right = DeclaredPlacement.__init__

    def alike(at: DeclaredPlacement, *args: Any, **fields: Any) -> None:
        if fields.get("component", "").endswith(".1"):
            fields["offset"] = 0
        right(at, *args, **fields)

    monkeypatch.setattr(DeclaredPlacement, "__init__", alike)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "by_layer_at"),
    [
        (ignore_offset, ""),
        (take_layers_in_order, ""),
        (write_under_another_group, ""),
        (begin_every_layer_alike, "source"),
    ],
)
def test_a_wrong_place_is_noticed(variant, by_layer_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many worlds, since not each has offsets, uneven layers and overlaid groups."""
    caches = (chunks._bound_plan, chunks._pair_index, by_layer, plan)
    for seed in range(8):
        hand_off(overlaid_world(seed), NEVER_PACK, by_layer_at)
    variant(monkeypatch)
    for cache in caches:
        cache.cache_clear()
    noticed = 0
    for seed in range(8):
        try:
            hand_off(overlaid_world(seed), NEVER_PACK, by_layer_at)
        except (AssertionError, ConfigError):
            noticed += 1
    for cache in caches:
        cache.cache_clear()
    assert noticed >= 2


@pytest.mark.parametrize("part", range(NUM_PARTS))
@settings(max_examples=4 * settings().max_examples // NUM_PARTS)
@given(worlds())
def test_every_target_byte_is_right_and_written_once(part: int, world: World) -> None:
    cost = [NEVER_PACK, ALWAYS_PACK, PackCost(span_s=2e-6)][world.seed % 3]
    with small_chunks_up_to(chunks.SMALL_SPANS_MAX if world.seed % 2 else 0):
        hand_off(world, cost, ("", "", "source", "target")[world.seed % 4])
