"""What one end of a hand-over works out alone, chunk by chunk.

A source rank knows its own page tables and, from the grant, those of the targets; a target rank knows its own
and no others. Together their steps are those of `baton.plan.binding.bind`, whichever mode a pair moves in:

    direct     plain copies from buffer to buffer; element types are equal
    convert    what changes its element type is copied into the target's staging and unpacked there, the rest
               goes direct
    pack       gathered into the source's staging, one copy, unpacked at the target

The mode is chosen for the whole prompt, so that one grant holds for all its chunks, however they are cut. In
staging the parts of a chunk lie one after another, each in canonical order: layer, token, unit, dims.

All of this runs while copies wait. What depends on the plan and the prompt alone is kept (`outline`), and the
parts of a chunk, once made by `parts_of`, serve every question about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import numpy as np

from baton.errors import ConfigError
from baton.plan.alike import sorts_of_pairs
from baton.plan.binding import direct, is_packed, landing, pack, staged, staging_copy, unpack
from baton.plan.ends import End, PageTables, PlanRoute, Tables
from baton.plan.lowering import Lowered
from baton.plan.outline import PLANS_MAX, Outline, Pair, Same, outline
from baton.plan.packing import PackCost
from baton.plan.parts import Part, PromptRoute, joined
from baton.plan.prompt import Chunk, Prompt
from baton.plan.ranges import Range
from baton.plan.routes import Plan
from baton.plan.steps import Copy, Pack, Spans, Unpack
from baton.plan.tokens import Ints

DIRECT, CONVERT, PACK = "direct", "convert", "pack"
NO_TABLES = Tables({}, {})


@dataclass(frozen=True, slots=True)
class Mode:
    """How a pair moves a prompt, and the staging that its chunks need together, however they are cut."""

    mode: str
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """Layers of which a pair needs the tokens from `start` to the end of the prompt."""

    layers: Range
    start: int


def parts_of(plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk, pair: Pair) -> list[Part]:
    """What a pair moves of a chunk; the side whose tables are not asked for may be left empty."""
    return outline(plan, prompt).parts(tables, chunk, pair)


def source_steps(parts: Sequence[Part], mode: str) -> list[Pack | Copy]:
    """What the source of a pair does for a chunk; offsets into staging count from the chunk's own place."""
    check_mode([part.fixed for part in parts], mode)
    if not parts:
        return []
    steps: list[Pack | Copy] = []
    if mode == PACK:
        steps.extend(pack(part, base) for part, base in staged(parts))
        steps.append(staging_copy(parts))
    else:
        steps.extend(direct([part for part in parts if not is_staged(part, mode)]))
        steps.extend(landing(part, base) for part, base in staged(_staged(parts, mode)))
    return steps


def direct_copies(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk, pair: Pair
) -> tuple[list[Copy], dict[str, int]] | None:
    """The copies of a chunk that moves in DIRECT mode, and its bytes by component; None where it is large.

    They are those of `source_steps`, found sooner.
    """
    cutting = outline(plan, prompt).cutting(chunk, pair, ("source", "target"))
    if cutting is None:
        return None
    filled = cutting.fill(tables, "source", "target")
    return [Copy(*pair, *buffers, spans) for buffers, spans in filled], cutting.num_bytes


def target_steps(parts: Sequence[Part], mode: str) -> list[Unpack]:
    """What the target of a pair does once a chunk's copies are done; needs the target's tables alone."""
    check_mode([part.fixed for part in parts], mode)
    return [unpack(part, base) for part, base in staged(_staged(parts, mode))]


def is_staged(part: Part, mode: str) -> bool:
    """Whether a part passes through the target's staging."""
    return mode == PACK or part.fixed.is_converted


def _staged(parts: Sequence[Part], mode: str) -> list[Part]:
    return [part for part in parts if is_staged(part, mode)]


def check_mode(routes: Iterable[PlanRoute], mode: str) -> None:
    """Raises ConfigError where routes cannot move in a mode."""
    if mode not in (DIRECT, CONVERT, PACK):
        raise ConfigError(f"unknown mode {mode!r}; use {DIRECT}, {CONVERT} or {PACK}")
    for fixed in routes:
        if mode == DIRECT and fixed.is_converted:
            source, target = fixed.dtypes
            raise ConfigError(
                f"component {fixed.component.name} is {source} at the source and {target} at the target, "
                f"so it cannot go {DIRECT}; use {CONVERT} or {PACK}"
            )
        if mode == PACK and fixed.plan.source.storage.granule > 1:
            granule = fixed.plan.source.storage.granule
            raise ConfigError(f"granules of {granule} tokens are never taken apart; use {DIRECT}")


def modes(plan: Plan, prompt: Prompt, cost: PackCost) -> dict[Pair, Mode]:
    """How each pair that has something to move is to do it, by what the whole prompt's copies cost."""
    known = outline(plan, prompt)
    found: dict[Pair, Mode] = {}
    for pairs in _alike(Same(plan)):
        parts = known.parts(known.no_pages, known.whole, pairs[0])
        if not parts:
            continue
        plain = CONVERT if any(part.fixed.is_converted for part in parts) else DIRECT
        mode = PACK if is_packed(parts, cost) else plain
        num_bytes = sum(part.num_bytes for part in _staged(parts, mode))
        found |= dict.fromkeys(pairs, Mode(mode, num_bytes))
    return dict(sorted(found.items()))


@lru_cache(maxsize=PLANS_MAX)
def _alike(same: Same) -> tuple[tuple[Pair, ...], ...]:
    return tuple(sort.pairs for sort in sorts_of_pairs(same.plan))


def staging_bytes(plan: Plan, prompt: Prompt, pair: Pair, mode: str) -> int:
    """The staging that a pair's chunks need together in a given mode, however they are cut."""
    known = outline(plan, prompt)
    found: int = known.kept(("staging", pair, mode), lambda: _staging_bytes(known, pair, mode))
    return found


def _staging_bytes(known: Outline, pair: Pair, mode: str) -> int:
    routes = known.routes(pair)
    check_mode([carried.fixed for carried in routes], mode)
    return sum(carried.num_bytes for carried in routes if mode == PACK or carried.fixed.is_converted)


def needs(plan: Plan, prompt: Prompt) -> dict[Pair, tuple[Need, ...]]:
    """The layers and tokens of a source rank's chunks that matter to each pair that has something to move.

    Once chunks cover them, their steps carry every byte of the pair; a pair may need tokens of which it
    carries nothing itself, because they are another rank's share.
    """
    known = outline(plan, prompt)
    found: dict[Pair, tuple[Need, ...]] = {}
    for pair in known.pairs:
        wanted = [
            (_start(carried), carried.layers.ids) for carried in known.routes(pair) if carried.num_bytes
        ]
        starts: dict[int, int] = {}
        # The least start of a layer is the last one to be put down.
        for start, layers in sorted(wanted, key=itemgetter(0), reverse=True):
            starts |= dict.fromkeys(layers, start)
        if starts:
            found[pair] = _runs_of_layers(starts)
    return found


def _start(carried: PromptRoute) -> int:
    """The first token that has to be there; a state is there with the last."""
    has_tokens = carried.fixed.component.extent.has_tokens
    return carried.strides[0].start if has_tokens else carried.prompt.num_tokens - 1


def _runs_of_layers(starts: Mapping[int, int]) -> tuple[Need, ...]:
    """Neighbouring layers with one start made one."""
    found: list[Need] = []
    for layer in sorted(starts):
        last = found[-1] if found else None
        if last is not None and (last.layers[1], last.start) == (layer, starts[layer]):
            found[-1] = Need((last.layers[0], layer + 1), last.start)
        else:
            found.append(Need((layer, layer + 1), starts[layer]))
    return tuple(found)


def expected_bytes(plan: Plan, prompt: Prompt) -> dict[Pair, dict[str, int]]:
    """The bytes on the wire of every pair that has something to move, by component."""
    known = outline(plan, prompt)
    found: dict[Pair, dict[str, int]] = {}
    for pair in known.pairs:
        sizes = {carried.fixed.component.name: carried.num_bytes for carried in known.routes(pair)}
        if any(sizes.values()):
            found[pair] = {name: num_bytes for name, num_bytes in sizes.items() if num_bytes}
    return found


def chunk_bytes(plan: Plan, prompt: Prompt, chunk: Chunk, pair: Pair) -> dict[str, int]:
    """The bytes on the wire that a pair moves of a chunk, by component."""
    return part_bytes(parts_of(plan, prompt, NO_TABLES, chunk, pair))


def part_bytes(parts: Iterable[Part]) -> dict[str, int]:
    """The bytes on the wire of a pair's parts, by component."""
    return {part.component.name: part.num_bytes for part in parts}


def writable(
    plan: Plan, prompt: Prompt, tables: PageTables, pair: Pair, mode: str
) -> dict[str, tuple[Ints, Ints]]:
    """Starts and lengths, by buffer, of the bytes that a pair's copies write outside of staging."""
    known = outline(plan, prompt)
    cutting = known.cutting(known.whole, pair, ("target", "target")) if mode == DIRECT else None
    if cutting is not None:
        return cutting.ranges(tables)
    parts = known.parts(Tables({}, tables), known.whole, pair)
    check_mode([carried.fixed for carried in known.routes(pair)], mode)
    found: dict[str, list[Lowered]] = {}
    for part in parts:
        if not is_staged(part, mode):
            found.setdefault(part.buffers[1], []).append(part.lower("target", "target"))
    ranges = {buffer: joined(spans) for buffer, spans in found.items()}
    return {buffer: (spans.source, spans.length) for buffer, spans in ranges.items()}


def pages_read(
    plan: Plan, prompt: Prompt, tables: Mapping[str, Ints], chunk: Chunk, source_rank: int
) -> dict[str, Ints]:
    """The pages of a source rank that a chunk's copies read, ascending by group; `tables` are its own."""
    known = outline(plan, prompt)
    sides = Tables({source_rank: tables}, {})
    parts = [part for pair in known.pairs_of_source(source_rank) for part in known.parts(sides, chunk, pair)]
    return {group: np.sort(pages) for group, pages in _pages(parts, "source").items()}


def check_pages(plan: Plan, prompt: Prompt, tables: Mapping[str, Ints], target_rank: int) -> None:
    """Raises ConfigError unless a target rank's tables are long enough and give each page once."""
    known = outline(plan, prompt)
    for end, entries in known.kept(("pages", target_rank), lambda: _entries(known, target_rank)):
        table = end.table({target_rank: tables}, int(entries[-1]) + 1)
        pages = table[entries].tolist()
        if len(set(pages)) != len(pages):
            twice = min(page for page, count in Counter(pages).items() if count > 1)
            raise ConfigError(
                f"the page table for group {end.group!r} of target rank {target_rank} gives page {twice} "
                "to two places of one prompt"
            )


def _entries(known: Outline, target_rank: int) -> list[tuple[End, Ints]]:
    """The entries of a target rank's page tables that a prompt uses, ascending, by group."""
    num_pages = known.prompt.num_tokens // known.plan.target.storage.page_tokens + 1
    counted = dict.fromkeys(known.plan.target.cache.groups, np.arange(num_pages, dtype=np.int64))
    sides = Tables({}, {target_rank: counted})
    pairs = known.pairs_of_target(target_rank)
    parts = [part for pair in pairs for part in known.parts(sides, known.whole, pair)]
    ends = {part.fixed.target.group: part.fixed.target for part in parts}
    return [(ends[group], entries) for group, entries in _pages(parts, "target").items() if len(entries)]


def check_reach(plan: Plan, prompt: Prompt, tables: PageTables, pair: Pair) -> bool:
    """Raises ConfigError unless the target's tables are long enough for a pair; whether it moves anything."""
    known = outline(plan, prompt)
    reach = known.kept(("reach", pair), lambda: _reach(known, pair))
    for end, num_pages in reach:
        end.table(tables, num_pages)
    return bool(reach)


def _reach(known: Outline, pair: Pair) -> list[tuple[End, int]]:
    """How long the target's page tables have to be for a pair, by group."""
    found: dict[str, tuple[End, int]] = {}
    for part in known.parts(NO_TABLES, known.whole, pair):
        end, num_pages = part.fixed.target, part.num_pages("target")
        if end.group not in found or found[end.group][1] < num_pages:
            found[end.group] = (end, num_pages)
    return list(found.values())


def _pages(parts: Iterable[Part], side: str) -> dict[str, Ints]:
    """The pages that parts touch at one end of one rank, by group, in the order of its table."""
    marks: dict[str, Ints] = {}
    tables: dict[str, Ints] = {}
    seen = set()
    for part in parts:
        end = part.fixed.source if side == "source" else part.fixed.target
        key = (end.group, part.strides)
        if key in seen:
            continue
        seen.add(key)
        part.pages(side)
        face = part.face(side)
        assert face.table is not None, "a rank's own memory has pages"
        tables[end.group] = face.table
        counts = marks.setdefault(end.group, np.zeros(len(face.table) + 1, dtype=np.int64))
        lengths = part.runs.stops - part.runs.starts
        np.add.at(counts, face.slots // face.page_entries, 1)
        np.subtract.at(counts, (face.slots + lengths - 1) // face.page_entries + 1, 1)
    return {group: tables[group][np.cumsum(counts[:-1]) > 0] for group, counts in marks.items()}


def canonical(parts: Iterable[Part], side: str) -> dict[str, tuple[str, Spans]]:
    """By component: the buffer of one side, and the spans that gather a chunk from it in canonical order."""
    found: dict[str, tuple[str, Spans]] = {}
    for part in parts:
        spans = joined([part.lower(side, "staging")])
        found[part.component.name] = (part.buffers[0 if side == "source" else 1], spans)
    return found


def places_in_staging(parts: Sequence[Part], mode: str) -> dict[str, Range]:
    """By component that passes through staging: where it lies there, counted from the chunk's own place."""
    found: dict[str, Range] = {}
    start = 0
    for part in _staged(parts, mode):
        found[part.component.name] = (start, start + part.num_bytes)
        start += part.num_bytes
    return found
