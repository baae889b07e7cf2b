"""The pages of every rank: the expected value of every byte, and the owner of each page at this moment.

A byte's value is a hash of (component, layer, token, unit) and prompt. Which rank holds which element comes
from `baton.plan.checker` and the strides of the pools, not from the planner, so that the two check each
other. Whatever does not depend on page tables or on the prompt's text is computed once for each spec, rank
and prompt length.

An owner is the positive `tag` of an attempt. A page is overwritten with junk when it is given back, so that a
copy which still reads it copies junk.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineError
from baton.plan.cache import Component
from baton.plan.checker import Holdings, has_tokens
from baton.plan.content import Bytes, mix
from baton.plan.dtypes import convert, item_bytes
from baton.plan.ownership import Spec, buffers, page_spaces, placements, space_sizes
from baton.plan.ranges import Range
from baton.plan.routes import Chunk
from baton.plan.storage import Placement
from baton.plan.tokens import Ints
from baton.sim.families import TOKENS_MAX

SIDE = "pool"
_FINITE = {1: 0x3F, 2: 0xBFFF, 4: 0xBFFFFFFF}
"""Masks that keep an element from being infinite or NaN, which a conversion need not preserve."""


@dataclass(frozen=True, slots=True)
class ComponentContent:
    """One component on one rank: offsets of its elements within a page, and their hashes without the prompt.

    Arrays are (layers, entries, elements of one entry).
    """

    component: Component
    buffer: str
    dtype: str
    layers: Ints
    tokens: Ints
    pages: Ints
    page_stride: int
    offsets: Ints
    hashes: NDArray[np.uint64]

    def select(self, chunk: Chunk, num_tokens: int) -> tuple[Ints, Ints]:
        """The layers and entries of a chunk; a state belongs to the chunk that ends the prompt."""
        layers = np.flatnonzero((self.layers >= chunk.layers[0]) & (self.layers < chunk.layers[1]))
        if self.component.extent.has_tokens:
            inside = (self.tokens >= chunk.tokens[0]) & (self.tokens < chunk.tokens[1])
            return layers, np.flatnonzero(inside)
        is_last = chunk.tokens[1] >= num_tokens
        return layers, np.arange(len(self.tokens) if is_last else 0)

    def offsets_in(self, table: Ints, layers: Ints, entries: Ints) -> Ints:
        at = table[self.pages[entries]] * self.page_stride
        return self.offsets[layers][:, entries] + at[None, :, None]

    def values(self, salt: int, layers: Ints, entries: Ints, dtype: str) -> Bytes:
        """The elements of a prompt, one row of bytes each, in the dtype in which they were computed."""
        size = item_bytes(dtype)
        mixed = mix(self.hashes[layers][:, entries] ^ np.uint64(salt)) >> np.uint64(64 - 8 * size)
        finite = (mixed & np.uint64(_FINITE[size])).astype(f"<u{size}")
        return np.ascontiguousarray(finite.reshape(-1, 1)).view(np.uint8)


@lru_cache(maxsize=8192)
def components_of(spec: Spec, rank: int, num_tokens: int) -> tuple[ComponentContent, ...]:
    """What a rank holds of a prompt of this length."""
    at = placements(spec, rank, SIDE)
    return tuple(
        _component(spec, rank, number, at[component.name], num_tokens)
        for number, component in enumerate(spec.cache.components)
        if component.name in at
    )


@lru_cache(maxsize=1024)
def _holdings(spec: Spec) -> Holdings:
    return Holdings(spec)


def _component(spec: Spec, rank: int, number: int, at: Placement, num_tokens: int) -> ComponentContent:
    component = spec.cache.components[number]
    held = _holdings(spec).of(component.name, rank)
    tokens = np.flatnonzero(_owned(spec, component, rank, num_tokens)).astype(np.int64)
    pages, rest = np.divmod(np.arange(len(tokens), dtype=np.int64), at.page_entries)
    along = [
        (np.array(sorted(held.layers)), _layer_starts(at, len(held.layers))),
        (tokens, rest * at.strides.get("token", 0)),
        (np.array(sorted(held.units)), np.arange(len(held.units)) * at.stride("unit")),
        *((np.arange(dim.size), np.arange(dim.size) * at.stride(dim.name)) for dim in component.dims),
    ]
    offsets = np.asarray(0, dtype=np.int64)
    hashes = np.asarray(number + 1, dtype=np.uint64)
    for names, steps in along:
        offsets = np.add.outer(offsets, steps)
        hashes = mix(np.add.outer(hashes * np.uint64(0x9E3779B97F4A7C15), names.astype(np.uint64)))
    shape = (len(held.layers), len(tokens), -1) if hashes.size else (len(held.layers), len(tokens), 1)
    return ComponentContent(
        component=component,
        buffer=at.buffer,
        dtype=spec.storage.dtype_of(component),
        layers=np.array(sorted(held.layers), dtype=np.int64),
        tokens=tokens,
        pages=pages,
        page_stride=at.stride("page"),
        offsets=offsets.reshape(shape),
        hashes=hashes.reshape(shape),
    )


def _layer_starts(at: Placement, num_layers: int) -> Ints:
    """Where layers begin, by the declaration: binding has code of its own for that."""
    offsets = at.layer_offsets or [i * at.stride("layer") for i in range(num_layers)]
    return np.array(offsets, dtype=np.int64) + at.offset


def _owned(spec: Spec, component: Component, rank: int, num_tokens: int) -> NDArray[np.bool_]:
    cp = spec.layout.coordinates(rank)["cp"]
    return has_tokens(spec, component, cp, component.extent.num_entries(num_tokens))


@dataclass(frozen=True, slots=True)
class ExpectedCache:
    """One prompt on one rank: its page tables and the bytes it must have there."""

    spec: Spec
    rank: int
    num_tokens: int
    salt: int
    origin: Spec
    """The source's spec: the elements were computed in its dtype."""
    tables: Mapping[str, Ints]

    def write(self, chunk: Chunk, memory: Mapping[str, Bytes]) -> None:
        """Writes a chunk into the rank's pool, as prefill does."""
        for part in components_of(self.spec, self.rank, self.num_tokens):
            layers, entries = part.select(chunk, self.num_tokens)
            if len(layers) and len(entries):
                offsets, values = self._offsets_and_values(part, layers, entries)
                memory[part.buffer][offsets] = values

    def write_held(self, held: Mapping[str, int], memory: Mapping[str, Bytes]) -> None:
        """Writes the held prefix into the rank's pool."""
        for part in components_of(self.spec, self.rank, self.num_tokens):
            if part.component.extent.has_tokens:
                entries = np.flatnonzero(part.tokens < held.get(part.component.group, 0))
                offsets, values = self._offsets_and_values(part, np.arange(len(part.layers)), entries)
                memory[part.buffer][offsets] = values

    def num_wrong(self, memory: Mapping[str, Bytes]) -> int:
        """How many of the bytes that decoding reads are wrong."""
        wrong = 0
        for part, layers, entries in self._needed({}):
            offsets, values = self._offsets_and_values(part, layers, entries)
            wrong += int(np.count_nonzero(memory[part.buffer][offsets] != values))
        return wrong

    def carried(self, chunks: Iterable[Chunk]) -> dict[str, Ints]:
        """The bytes that copies of these chunks read at the source, by buffer."""
        granule, reads = self.spec.storage.granule, dict[str, list[Ints]]()
        whole = -(-self.num_tokens // granule) * granule
        for chunk in chunks:
            # A granule goes with the chunk that ends it, the last one with the end of the prompt.
            start, stop = chunk.tokens
            stop = whole if stop >= self.num_tokens else stop - stop % granule
            granules = Chunk(chunk.layers, (start - start % granule, stop))
            for part in components_of(self.spec, self.rank, whole):
                layers, entries = part.select(granules, whole)
                if len(layers) and len(entries):
                    reads.setdefault(part.buffer, []).append(self._bytes(part, layers, entries).reshape(-1))
        return {buffer: np.concatenate(parts) for buffer, parts in reads.items()}

    def transferred(self, held: Mapping[str, int]) -> list[tuple[str, Ints]]:
        """The bytes that a transfer has to bring, by buffer."""
        return [
            (part.buffer, self._bytes(part, layers, entries).reshape(-1))
            for part, layers, entries in self._needed(held)
        ]

    def _needed(self, held: Mapping[str, int]) -> list[tuple[ComponentContent, Ints, Ints]]:
        needed = []
        for part in components_of(self.spec, self.rank, self.num_tokens):
            start, stop = part.component.extent.wanted(self.num_tokens, held.get(part.component.group, 0))
            entries = np.flatnonzero((part.tokens >= start) & (part.tokens < stop))
            if len(entries) and len(part.layers):
                needed.append((part, np.arange(len(part.layers)), entries))
        return needed

    def _offsets_and_values(self, part: ComponentContent, layers: Ints, entries: Ints) -> tuple[Ints, Bytes]:
        given = self.origin.cache.by_name.get(part.component.name, part.component)
        dtype = self.origin.storage.dtype_of(given)
        values = part.values(self.salt, layers, entries, dtype)
        if dtype != part.dtype:
            values = convert(values.reshape(-1), dtype, part.dtype).reshape(-1, item_bytes(part.dtype))
        return self._bytes(part, layers, entries), values

    def _bytes(self, part: ComponentContent, layers: Ints, entries: Ints) -> Ints:
        offsets = part.offsets_in(self.tables[part.component.group], layers, entries).reshape(-1, 1)
        return offsets + np.arange(item_bytes(part.dtype))


@lru_cache(maxsize=8192)
def pages_needed(spec: Spec, rank: int, num_tokens: int) -> dict[str, int]:
    """Pages of each group that a rank needs for a prompt; the last granule counts whole."""
    granule = spec.storage.granule
    whole = -(-num_tokens // granule) * granule
    needed: dict[str, int] = {}
    for component in spec.cache.components:
        entries = int(_owned(spec, component, rank, whole).sum())
        page = spec.storage.page_entries(component)
        needed[component.group] = max(needed.get(component.group, 0), -(-entries // page))
    return needed


@lru_cache(maxsize=4096)
def prefixes(spec: Spec, num_tokens: int) -> tuple[int, ...]:
    """Prefix lengths that end on a page boundary on every rank, so that a target can hold them."""
    component = next((part for part in spec.cache.components if part.extent.has_tokens), None)
    if component is None:
        return (0,)
    owned = [has_tokens(spec, component, cp, num_tokens) for cp in range(spec.layout.size("cp"))]
    counts = np.concatenate([np.zeros((len(owned), 1), dtype=np.int64), np.cumsum(owned, axis=1)], axis=1)
    return tuple(np.flatnonzero((counts % spec.storage.page_tokens == 0).all(axis=0)).tolist())


@lru_cache(maxsize=4096)
def page_bases(spec: Spec, rank: int) -> dict[str, int]:
    """The number of each group's page 0 when the pages of a rank are numbered in a row.

    Groups that overlay each other have the same pages.
    """
    spaces, sizes = page_spaces(spec, rank), space_sizes(spec, rank)
    bases, base = {}, 0
    for space, size in sizes.items():
        bases[space] = base
        base += size
    return {group: bases[spaces[group]] for group in spec.cache.groups}


@lru_cache(maxsize=2048)
def pages_of_bytes(spec: Spec, rank: int) -> dict[str, Ints]:
    """The page number of every byte of every buffer, -1 where there is no page."""
    pages = {name: np.full(size, -1, dtype=np.int64) for name, size in buffers(spec, rank, SIDE).items()}
    bases = page_bases(spec, rank)
    for component in spec.cache.components:
        at = placements(spec, rank, SIDE).get(component.name)
        if at is None:
            continue
        held = _holdings(spec).of(component.name, rank)
        ids = np.arange(spec.storage.pages_of(component.group), dtype=np.int64)
        offsets = np.add.outer(ids * at.stride("page"), _layer_starts(at, len(held.layers)))
        extents: list[Range] = [
            (at.page_entries, at.strides.get("token", 0)),
            (len(held.units), at.stride("unit")),
            *((dim.size, at.stride(dim.name)) for dim in component.dims),
            (at.item_bytes, 1),
        ]
        for count, stride in extents:
            offsets = np.add.outer(offsets, np.arange(count) * stride)
        owners = np.broadcast_to(ids.reshape(-1, *[1] * (offsets.ndim - 1)), offsets.shape)
        pages[at.buffer][offsets.reshape(-1)] = (bases[component.group] + owners).reshape(-1)
    return pages


FREE = 0
BALLAST = -1
GAP = -2
"""Bytes of a buffer that belong to no page."""
JUNK = 0xA5


class SimPagePool:
    """A rank's buffers, and the owner of every page of every page space."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.memory: dict[str, Bytes] = {
            name: np.full(size, JUNK, dtype=np.uint8) for name, size in buffers(spec, rank, SIDE).items()
        }
        self.spaces = page_spaces(spec, rank)
        sizes = space_sizes(spec, rank)
        # The last one is for bytes of no page, which have the number -1.
        self.owner = np.zeros(sum(sizes.values()) + 1, dtype=np.int64)
        self.owner[-1] = GAP
        self.num_pages = dict(sizes)
        """By page space, without those that other work has taken away."""
        self.num_writes = {name: np.zeros(len(raw), dtype=np.int64) for name, raw in self.memory.items()}
        self._free = {space: list(range(size)) for space, size in sizes.items()}

    def can_take(self, wanted: Mapping[str, int]) -> bool:
        together = Counter[str]()
        for group, count in wanted.items():
            together[self.spaces[group]] += count
        return all(len(self._free[space]) >= count for space, count in together.items())

    def take(self, wanted: Mapping[str, int], tag: int, rng: random.Random) -> dict[str, Ints]:
        """Allocates pages for an owner, scattered or in order."""
        tables: dict[str, Ints] = {}
        bases = page_bases(self.spec, self.rank)
        for group, count in sorted(wanted.items()):
            free = self._free[self.spaces[group]]
            if rng.random() < 0.5:
                rng.shuffle(free)
            ids = [free.pop() for _ in range(count)]
            tables[group] = np.array(ids, dtype=np.int64)
            pages = tables[group] + bases[group]
            if (self.owner[pages] != FREE).any():
                raise EngineError(f"a free page of group {group} on rank {self.rank} has an owner")
            self.owner[pages] = tag
            self._reset_counts(pages)
        return tables

    def give_back(self, group: str, ids: Iterable[int], tag: int) -> None:
        """Frees pages of an owner and overwrites them with junk."""
        base = page_bases(self.spec, self.rank)[group]
        for page in ids:
            if self.owner[base + page] != tag:
                raise EngineError(
                    f"page {page} of group {group} on rank {self.rank} is owned by "
                    f"{self.owner[base + page]}, not by {tag} which gives it back"
                )
            self.owner[base + page] = FREE
            self._free[self.spaces[group]].append(page)
            for name, owners in pages_of_bytes(self.spec, self.rank).items():
                self.memory[name][owners == base + page] = JUNK

    def fill(self, share: float, rng: random.Random) -> None:
        """Takes a share of the pages away for good, as other work would; room for one prompt stays."""
        bases = page_bases(self.spec, self.rank)
        for space, free in sorted(self._free.items()):
            total = space_sizes(self.spec, self.rank)[space]
            room = sum(_room(self.spec, group) for group, other in self.spaces.items() if other == space)
            spare = total - min(int(total * share), total - room)
            rng.shuffle(free)
            gone, self._free[space] = free[spare:], free[:spare]
            self.num_pages[space] -= len(gone)
            self.owner[np.array(gone, dtype=np.int64) + bases[space]] = BALLAST

    def owners(self) -> list[int]:
        """The owners that hold a page, sorted."""
        return sorted(set(self.owner[self.owner > FREE].tolist()))

    def num_dirty_bytes(self) -> int:
        """Bytes of free pages that were written after they were given back, and of gaps between pages."""
        is_clean = (self.owner == FREE) | (self.owner == GAP)
        return sum(
            int(np.count_nonzero(self.memory[name][is_clean[pages]] != JUNK))
            for name, pages in pages_of_bytes(self.spec, self.rank).items()
        )

    def owners_of(self, name: str, index: Ints) -> Ints:
        """The owners of these bytes of a buffer."""
        return np.asarray(self.owner[pages_of_bytes(self.spec, self.rank)[name][index]])

    def _reset_counts(self, pages: Ints) -> None:
        for name, owners in pages_of_bytes(self.spec, self.rank).items():
            self.num_writes[name][np.isin(owners, pages)] = 0


def _room(spec: Spec, group: str) -> int:
    return max(pages_needed(spec, rank, TOKENS_MAX).get(group, 0) for rank in range(spec.layout.num_ranks))
