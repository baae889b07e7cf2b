"""The simulator's expected bytes agree with the planner, and its pools track their owners."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.errors import EngineError
from baton.plan.binding import bind
from baton.plan.chunks import Tables
from baton.plan.content import execute
from baton.plan.ownership import Spec, page_spaces
from baton.plan.planner import plan
from baton.plan.routes import Chunk, Prompt
from baton.sim.content import GAP, ExpectedCache, SimPagePool, pages_needed, pages_of_bytes, prefixes
from baton.sim.families import NUM_FAMILIES, family

EVERY_LAYER = (0, 99)


def fill(spec, dp: int, num_tokens: int, chance: random.Random, origin):
    """Pools and expected caches of a dp group, with pages taken for one prompt."""
    pools, books = {}, {}
    for rank in spec.layout.group(dp):
        pools[rank] = SimPagePool(spec, rank)
        tables = pools[rank].take(pages_needed(spec, rank, num_tokens), 7, chance)
        books[rank] = ExpectedCache(spec, rank, num_tokens, 12345, origin, tables)
    return pools, books


@pytest.mark.parametrize("number", range(0, NUM_FAMILIES, 3))
def test_a_planned_handoff_is_right_and_a_flipped_bit_is_not(number: int) -> None:
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
            pages = pages_of_bytes(spec, rank).values()
            assert spec.storage.placements or all((inside >= 0).all() for inside in pages)
            assert all((inside >= 0).any() for inside in pages)


def declared_families() -> list[Spec]:
    specs = (spec for number in range(NUM_FAMILIES) for spec in family(number).targets)
    return [spec for spec in specs if spec.storage.placements]


def test_families_have_gaps_uneven_layers_and_overlaid_groups() -> None:
    specs = declared_families()
    assert any((pages < 0).any() for spec in specs for pages in pages_of_bytes(spec, 0).values())
    assert any(at.layer_offsets for spec in specs for at in spec.storage.placements)
    assert any(len({at.buffer for at in spec.storage.placements}) == 1 for spec in specs)
    assert any(len(set(page_spaces(spec, 0).values())) < len(spec.cache.groups) for spec in specs)


def test_overlaid_groups_take_their_pages_from_one_pool() -> None:
    overlaid = [
        spec
        for spec in declared_families()
        if len(set(page_spaces(spec, 0).values())) < len(spec.cache.groups)
    ]
    for spec in overlaid:
        pool, taken = SimPagePool(spec, 0), []
        while pool.can_take(dict.fromkeys(spec.cache.groups, 1)):
            taken.append(pool.take(dict.fromkeys(spec.cache.groups, 1), 3, random.Random(1)))
        ids = [int(page) for tables in taken for pages in tables.values() for page in pages]
        assert (
            len(set(ids)) == len(ids) > spec.storage.pages_of(spec.cache.groups[0]) - len(spec.cache.groups)
        )
        for tables in taken:
            for group, pages in tables.items():
                pool.give_back(group, pages.tolist(), 3)
        assert pool.num_dirty_bytes() == 0


def test_a_write_into_a_gap_is_noticed() -> None:
    spec = next(
        spec for spec in declared_families() if any((p < 0).any() for p in pages_of_bytes(spec, 0).values())
    )
    pool = SimPagePool(spec, 0)
    name, pages = next((name, p) for name, p in pages_of_bytes(spec, 0).items() if (p < 0).any())
    index = np.flatnonzero(pages < 0)[:1]
    assert pool.owners_of(name, index).tolist() == [GAP]
    pool.memory[name][index] ^= 1
    assert pool.num_dirty_bytes() == 1


def test_a_pool_notices_a_page_that_is_given_back_by_a_stranger_or_twice() -> None:
    spec = family(0).targets[0]
    pool = SimPagePool(spec, 0)
    taken = pool.take(pages_needed(spec, 0, 8), 3, random.Random(1))
    group, ids = next((group, ids.tolist()) for group, ids in taken.items() if len(ids))
    with pytest.raises(EngineError, match="not by 4"):
        pool.give_back(group, ids, 4)
    pool.give_back(group, ids, 3)
    with pytest.raises(EngineError, match="owned by 0"):
        pool.give_back(group, ids, 3)


def test_a_page_that_is_given_back_is_scribbled_over() -> None:
    spec = family(0).targets[0]
    pool = SimPagePool(spec, 0)
    taken = pool.take(pages_needed(spec, 0, 8), 3, random.Random(1))
    for raw in pool.memory.values():
        raw.fill(1)
    for group, ids in taken.items():
        pool.give_back(group, ids.tolist(), 3)
    assert sum(int(np.count_nonzero(raw != 1)) for raw in pool.memory.values()) > 0
    assert pool.owners() == []
