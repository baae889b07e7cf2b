"""The simulator's expected bytes agree with the planner, and its pools track their owners."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.errors import EngineError
from baton.plan.binding import bind
from baton.plan.chunks import Tables
from baton.plan.execution import execute
from baton.plan.planner import plan
from baton.plan.routes import Chunk, Prompt
from baton.sim.content import ExpectedCache, pages_needed, pages_of_bytes, prefixes
from baton.sim.families import NUM_FAMILIES, family
from baton.sim.pool import PagePool

EVERY_LAYER = (0, 99)


def fill(spec, dp: int, num_tokens: int, chance: random.Random, origin):
    """Pools and expected caches of a dp group, with pages taken for one prompt."""
    pools, books = {}, {}
    for rank in spec.layout.group(dp):
        pools[rank] = PagePool(spec, rank)
        tables = pools[rank].take(pages_needed(spec, rank, num_tokens), 7, chance)
        books[rank] = ExpectedCache(spec, rank, num_tokens, 12345, origin, tables)
    return pools, books


@pytest.mark.parametrize("number", range(0, NUM_FAMILIES, 3))
def test_a_planned_hand_over_is_right_and_a_flipped_bit_is_not(number: int) -> None:
    found, chance = family(number), random.Random(number)
    for source in found.sources:
        for target in found.targets:
            num_tokens = chance.randint(1, 24)
            num_held = chance.choice(prefixes(target, num_tokens))
            groups = {part.group for part in target.cache.components if part.extent.has_tokens}
            held = dict.fromkeys(groups, num_held)
            given, sent = fill(source, 0, num_tokens, chance, source)
            taken, wanted = fill(target, 0, num_tokens, chance, source)
            for rank, book in sent.items():
                book.write(Chunk(EVERY_LAYER, (0, num_tokens)), given[rank].memory)
            for rank, book in wanted.items():
                book.write_held(held, taken[rank].memory)
            steps = bind(
                plan(source, target),
                Prompt(num_tokens, held),
                Tables({r: b.tables for r, b in sent.items()}, {r: b.tables for r, b in wanted.items()}),
                Chunk(EVERY_LAYER, (0, num_tokens)),
            )
            execute(steps, memory_of(given), memory_of(taken))
            assert [book.num_wrong(taken[rank].memory) for rank, book in wanted.items()] == [0] * len(wanted)
            spoil_one(wanted, taken, held)


def memory_of(pools):
    return {(rank, name): raw for rank, pool in pools.items() for name, raw in pool.memory.items()}


def spoil_one(books, pools, held) -> None:
    for rank, book in books.items():
        for buffer, index in book.transferred(held):
            pools[rank].memory[buffer][index[0]] ^= 1
            assert book.num_wrong(pools[rank].memory) >= 1
            return


@pytest.mark.parametrize("number", range(0, NUM_FAMILIES, 7))
def test_every_byte_of_a_pool_belongs_to_a_page(number: int) -> None:
    for spec in family(number).targets:
        for rank in range(spec.layout.num_ranks):
            assert all((pages >= 0).all() for pages in pages_of_bytes(spec, rank).values())


def test_a_pool_notices_a_page_that_is_given_back_by_a_stranger_or_twice() -> None:
    spec = family(0).targets[0]
    pool = PagePool(spec, 0)
    taken = pool.take(pages_needed(spec, 0, 8), 3, random.Random(1))
    group, ids = next((group, ids.tolist()) for group, ids in taken.items() if len(ids))
    with pytest.raises(EngineError, match="not by 4"):
        pool.give_back(group, ids, 4)
    pool.give_back(group, ids, 3)
    with pytest.raises(EngineError, match="owned by 0"):
        pool.give_back(group, ids, 3)


def test_a_page_that_is_given_back_is_scribbled_over() -> None:
    spec = family(0).targets[0]
    pool = PagePool(spec, 0)
    taken = pool.take(pages_needed(spec, 0, 8), 3, random.Random(1))
    for raw in pool.memory.values():
        raw.fill(1)
    for group, ids in taken.items():
        pool.give_back(group, ids.tolist(), 3)
    assert sum(int(np.count_nonzero(raw != 1)) for raw in pool.memory.values()) > 0
    assert pool.owners() == []
