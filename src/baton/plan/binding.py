"""Binds a chunk: from a plan, a prompt and page tables to steps.

A source rank binds with its own page tables and those of the targets, which a grant brings (`bind_source`); a
target rank binds with its own alone (`bind_target`). `bind` does both for every pair of ranks: what the tests
prove of it holds for the ranks. A pair moves in one of three modes:

    direct     plain copies from buffer to buffer; element types are equal
    convert    what changes its element type is copied into the target's staging and unpacked there, the rest
               goes direct
    pack       gathered into the source's staging, one copy, unpacked at the target

The mode is chosen by what the copies of the whole prompt cost, so that one grant holds for all its chunks,
however they are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from baton.errors import ConfigError
from baton.plan.chunks import (
    Gathers,
    PageTables,
    Pair,
    RouteChunk,
    RouteEnd,
    Tables,
    bound_plan,
    check_mode,
    pairs_alike,
)
from baton.plan.ranges import Range
from baton.plan.routes import Chunk, Plan, Prompt
from baton.plan.steps import PACK, STAGING, Copy, Pack, PackCost, Spans, Step, Unpack
from baton.plan.tokens import Ints, count_below

# What a transfer settles before its first chunk.


@dataclass(frozen=True, slots=True)
class Mode:
    """How a pair moves a prompt, and the staging that its chunks need together, however they are cut."""

    mode: str
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class PairNeed:
    """Layers of which a pair needs the tokens from `start` to the end of the prompt."""

    layers: Range
    start: int


def modes(plan: Plan, prompt: Prompt, cost: PackCost) -> dict[Pair, Mode]:
    """The mode of each pair that has something to move, by what the whole prompt's copies cost."""
    bound = bound_plan(plan, prompt)
    chosen: dict[Pair, Mode] = {}
    for pairs in pairs_alike(plan):
        moved = bound.whole(pairs[0])
        if moved.parts:
            mode = moved.mode(cost)
            chosen |= dict.fromkeys(pairs, Mode(mode, moved.staging_bytes(mode)))
    return dict(sorted(chosen.items()))


def staging_bytes(plan: Plan, prompt: Prompt, pair: Pair, mode: str) -> int:
    """The staging that a pair's chunks need together in a given mode, however they are cut."""
    bound = bound_plan(plan, prompt)

    def count() -> int:
        routes = bound.routes(pair)
        check_mode([route.placed for route in routes], mode)
        return sum(route.num_bytes for route in routes if mode == PACK or route.placed.is_converted)

    num_bytes: int = bound.kept(("staging", pair, mode), count)
    return num_bytes


def needs(plan: Plan, prompt: Prompt) -> dict[Pair, tuple[PairNeed, ...]]:
    """The layers and tokens of a source rank's chunks that matter to each pair that has something to move.

    Once chunks cover them, their steps carry every byte of the pair; a pair may need tokens of which it
    carries nothing itself, because they are another rank's share.
    """
    bound = bound_plan(plan, prompt)
    by_pair: dict[Pair, tuple[PairNeed, ...]] = {}
    for pair in bound.pairs:
        carrying = [(route.first_token, route.layers[0]) for route in bound.routes(pair) if route.num_bytes]
        starts: dict[int, int] = {}
        # The least start of a layer is the last one to be put down.
        for start, layers in sorted(carrying, key=itemgetter(0), reverse=True):
            starts |= dict.fromkeys(layers, start)
        if starts:
            by_pair[pair] = _layer_ranges(starts)
    return by_pair


def _layer_ranges(starts: Mapping[int, int]) -> tuple[PairNeed, ...]:
    """Neighbouring layers with the same start as one range."""
    ranges: list[PairNeed] = []
    for layer in sorted(starts):
        last = ranges[-1] if ranges else None
        if last is not None and (last.layers[1], last.start) == (layer, starts[layer]):
            ranges[-1] = PairNeed((last.layers[0], layer + 1), last.start)
        else:
            ranges.append(PairNeed((layer, layer + 1), starts[layer]))
    return tuple(ranges)


def expected_bytes(plan: Plan, prompt: Prompt) -> dict[Pair, dict[str, int]]:
    """The bytes on the wire of every pair that has something to move, by component."""
    bound = bound_plan(plan, prompt)
    by_pair: dict[Pair, dict[str, int]] = {}
    for pair in bound.pairs:
        sizes = {
            route.placed.component.name: route.num_bytes for route in bound.routes(pair) if route.num_bytes
        }
        if sizes:
            by_pair[pair] = sizes
    return by_pair


def check_reach(plan: Plan, prompt: Prompt, tables: PageTables, pair: Pair) -> bool:
    """Raises ConfigError unless the target's tables are long enough for a pair; whether it moves anything."""
    bound = bound_plan(plan, prompt)

    def longest() -> list[tuple[RouteEnd, int]]:
        by_group: dict[str, tuple[RouteEnd, int]] = {}
        for part in bound.whole(pair).parts:
            end, num_pages = part.placed.target, part.num_pages["target"]
            if end.group not in by_group or by_group[end.group][1] < num_pages:
                by_group[end.group] = (end, num_pages)
        return list(by_group.values())

    reach: list[tuple[RouteEnd, int]] = bound.kept(("reach", pair), longest)
    for end, num_pages in reach:
        end.table(tables, num_pages)
    return bool(reach)


def check_pages(plan: Plan, prompt: Prompt, tables: Mapping[str, Ints], target_rank: int) -> None:
    """Raises ConfigError unless a target rank's tables are long enough and give each page once."""
    bound = bound_plan(plan, prompt)

    def used_entries() -> list[tuple[RouteEnd, Ints]]:
        num_pages = prompt.num_tokens // plan.target.storage.page_tokens + 1
        numbers = dict.fromkeys(plan.target.cache.groups, np.arange(num_pages, dtype=np.int64))
        parts = [part for pair in bound.pairs_of_target(target_rank) for part in bound.whole(pair).parts]
        ends = {part.placed.target.group: part.placed.target for part in parts}
        entries = _pages_of(parts, "target", {target_rank: numbers})
        return [(ends[group], used) for group, used in entries.items() if len(used)]

    used: list[tuple[RouteEnd, Ints]] = bound.kept(("pages", target_rank), used_entries)
    for end, entries in used:
        pages = end.table({target_rank: tables}, int(entries[-1]) + 1)[entries].tolist()
        if len(set(pages)) != len(pages):
            twice = min(page for page, count in Counter(pages).items() if count > 1)
            raise ConfigError(
                f"the page table for group {end.group!r} of target rank {target_rank} gives page {twice} "
                "to two places of one prompt"
            )


# A chunk.


@dataclass(frozen=True, slots=True)
class TransferTerms:
    """The terms of a grant for one transfer; `tables` are the target's, `modes` go by pair of ranks."""

    plan: Plan
    prompt: Prompt
    tables: PageTables
    modes: Mapping[Pair, str]
    is_verified: bool = False

    def mode(self, pair: Pair) -> str:
        """How a pair moves; raises ConfigError where the grant has no lane for it."""
        try:
            return self.modes[pair]
        except KeyError:
            raise ConfigError(f"no lane from source rank {pair[0]} to target rank {pair[1]}") from None


@dataclass(frozen=True, slots=True)
class ChunkSend:
    """What a source rank does for one chunk and one target rank; `sums` is empty unless verified.

    Offsets into staging count from the chunk's own place there (`place_in_staging`).
    """

    target_rank: int
    packs: tuple[Pack, ...]
    copies: tuple[Copy, ...]
    staging_bytes: int
    """At the target; where there are packs, as much at the source."""
    num_bytes: dict[str, int]
    sums: Gathers


@dataclass(frozen=True, slots=True)
class ChunkReceive:
    """What a target rank does once a chunk of one source rank is there; `sums` is empty unless verified."""

    source_rank: int
    unpacks: tuple[Unpack, ...]
    staging_bytes: int
    num_bytes: dict[str, int]
    sums: Gathers


def bind_source(
    terms: TransferTerms, source_rank: int, source_tables: Mapping[str, Ints], chunk: Chunk
) -> list[ChunkSend]:
    """The steps of a source rank for a chunk, for each target rank that gets part of it."""
    bound = bound_plan(terms.plan, terms.prompt)
    tables = Tables({source_rank: source_tables}, terms.tables)
    sends: list[ChunkSend] = []
    for pair in bound.pairs_of_source(source_rank):
        moved = bound.chunk(pair, chunk)
        if not moved.parts:
            continue
        mode = terms.mode(pair)
        sends.append(
            ChunkSend(
                target_rank=pair[1],
                packs=tuple(moved.packs(tables)) if mode == PACK else (),
                copies=tuple(moved.copies(tables, mode)),
                staging_bytes=moved.staging_bytes(mode),
                num_bytes=moved.num_bytes,
                sums=moved.gathers(tables, "source", mode) if terms.is_verified else {},
            )
        )
    return sends


def bind_target(terms: TransferTerms, source_rank: int, target_rank: int, chunk: Chunk) -> ChunkReceive:
    """The steps of a target rank for a chunk of a source rank; needs only its own page tables."""
    pair, tables = (source_rank, target_rank), Tables({}, terms.tables)
    moved = bound_plan(terms.plan, terms.prompt).chunk(pair, chunk)
    if not moved.parts:
        return ChunkReceive(source_rank, (), 0, {}, {})
    mode = terms.mode(pair)
    return ChunkReceive(
        source_rank=source_rank,
        unpacks=tuple(moved.unpacks(tables, mode)),
        staging_bytes=moved.staging_bytes(mode),
        num_bytes=moved.num_bytes,
        sums=moved.gathers(tables, "target", mode) if terms.is_verified else {},
    )


def bind(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk, cost: PackCost | None = None
) -> list[Step]:
    """The steps that move one chunk between all pairs of ranks, as the ranks of each pair compute them."""
    chosen = {pair: mode.mode for pair, mode in modes(plan, prompt, cost or PackCost()).items()}
    terms = TransferTerms(plan, prompt, tables.target, chosen)
    steps: list[Step] = []
    for source_rank in dict.fromkeys(pair[0] for pair in bound_plan(plan, prompt).pairs):
        for send in bind_source(terms, source_rank, tables.source.get(source_rank, {}), chunk):
            receive = bind_target(terms, source_rank, send.target_rank, chunk)
            steps += [*send.packs, *send.copies, *receive.unpacks]
    return steps


def writable(terms: TransferTerms, source_rank: int, target_rank: int) -> dict[str, tuple[Ints, Ints]]:
    """Starts and lengths, by buffer of the target rank, of what a pair's copies write outside of staging."""
    pair = (source_rank, target_rank)
    moved, mode = bound_plan(terms.plan, terms.prompt).whole(pair), terms.mode(pair)
    if len(moved.staged(mode)) == len(moved.parts):
        return {}
    ranges = moved.unstaged_spans(Tables({}, terms.tables), "target", "target")
    return {buffers[1]: (spans.source, spans.length) for buffers, spans in ranges}


def place_in_staging(copy: Copy, source_at: int, target_at: int) -> Spans:
    """A copy's spans once it is known where in either end's staging the chunk lies."""
    source, target = copy.spans.source, copy.spans.target
    if copy.source_buffer == STAGING:
        source = source + source_at
    if copy.target_buffer == STAGING:
        target = target + target_at
    return Spans(source, target, copy.spans.length)


def pages_read(
    plan: Plan, prompt: Prompt, tables: Mapping[str, Ints], chunk: Chunk, source_rank: int
) -> dict[str, Ints]:
    """The pages of a source rank that a chunk's copies read, ascending by group; `tables` are its own."""
    bound = bound_plan(plan, prompt)
    parts = [part for pair in bound.pairs_of_source(source_rank) for part in bound.chunk(pair, chunk).parts]
    return {
        group: np.sort(pages) for group, pages in _pages_of(parts, "source", {source_rank: tables}).items()
    }


def _pages_of(parts: Iterable[RouteChunk], side: str, tables: PageTables) -> dict[str, Ints]:
    """The pages that parts touch at one end of one rank, by group, in the order of its table."""
    marks: dict[str, Ints] = {}
    by_group: dict[str, Ints] = {}
    seen = set()
    for part in parts:
        end, entries = part.end(side), part.entries
        if (end.group, entries) in seen:
            continue
        seen.add((end.group, entries))
        table = by_group[end.group] = end.table(tables, part.num_pages[side])
        counts = marks.setdefault(end.group, np.zeros(len(table) + 1, dtype=np.int64))
        slots = count_below(part.owned(side), entries.runs.starts)
        lengths = entries.runs.stops - entries.runs.starts
        np.add.at(counts, slots // end.at.page_entries, 1)
        np.subtract.at(counts, (slots + lengths - 1) // end.at.page_entries + 1, 1)
    return {group: by_group[group][np.cumsum(counts[:-1]) > 0] for group, counts in marks.items()}
