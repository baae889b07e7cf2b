"""Random hand-overs carried out on numpy buffers: every target byte right, written once, nothing else
touched.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from tests.plan.world import World, holdings, needed, page_tables, put, raw_values, worlds

from baton.plan.binding import Tables, bind
from baton.plan.checker import check
from baton.plan.conversion import convert
from baton.plan.execution import Memory, allocate, execute
from baton.plan.packing import ALWAYS_PACK, NEVER_PACK, PackCost
from baton.plan.planner import plan
from baton.plan.prompt import Chunk, Prompt, resolve
from baton.plan.steps import STAGING, Copy, Step, Unpack

FILL = 0xA5
NUM_PARTS = 8
"""So that several processes share the search."""


def chunks_of(world: World, rng: random.Random) -> list[Chunk]:
    """The prompt cut into layers x tokens at random places, in random order."""
    num_layers = 1 + max(layers[-1][1] for layers in (c.layers for c in world.target.cache.components))
    layer_cuts = sorted({0, num_layers, *(rng.randrange(num_layers) for _ in range(rng.randrange(3)))})
    total = world.prompt.num_tokens
    token_cuts = sorted({0, total, *(rng.randrange(total) for _ in range(rng.randrange(3)))})
    found = [
        Chunk(layers, tokens)
        for layers in itertools.pairwise(layer_cuts)
        for tokens in itertools.pairwise(token_cuts)
    ]
    rng.shuffle(found)
    return found


def padded(prompt: Prompt, granule: int) -> int:
    return -(-prompt.num_tokens // granule) * granule


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


def count_writes(steps: list[Step], target: Memory) -> Memory:
    found = {key: np.zeros(len(buffer), dtype=np.int64) for key, buffer in target.items()}
    for step in steps:
        if isinstance(step, Copy) and step.target_buffer != STAGING:
            key, grow = (step.target, step.target_buffer), (1, 1)
        elif isinstance(step, Unpack):
            sizes = {"fp32": 4, "fp8": 1, "bf16": 2, "fp16": 2}
            key, grow = (step.target, step.buffer), (sizes[step.dtypes[1]], sizes[step.dtypes[0]])
        else:
            continue
        for at, length in zip(step.spans.target.tolist(), step.spans.length.tolist(), strict=True):
            found[key][at : at + length * grow[0] // grow[1]] += 1
    return found


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


def hand_over(world: World, cost: PackCost) -> None:
    """Plans, binds and executes one world chunk by chunk and compares every byte of the target."""
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


@pytest.mark.parametrize("part", range(NUM_PARTS))
@settings(max_examples=max(2000, settings().max_examples) // NUM_PARTS)
@given(worlds())
def test_every_target_byte_is_right_and_written_once(part: int, world: World) -> None:
    cost = [NEVER_PACK, ALWAYS_PACK, PackCost(span_s=2e-6)][world.seed % 3]
    hand_over(world, cost)
