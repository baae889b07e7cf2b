"""Where the rows of a pass are stored and where their keys lie: index tensors, made once per pass.

A pool is seen as one row of channels per page, unit and token; everything here is a list of such rows.
Reading token by token, not page by page, keeps other content of a page (an earlier owner's, perhaps not even
finite) out of every result. Padding repeats a key of the same sequence and is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.pools import Scratch
from baton.engine.attention.prefill import ChunkInputs
from baton.engine.commands import ScheduledSequence
from baton.errors import EngineError
from baton.plan.layout import Scheme, Split
from baton.plan.ranges import Range, Ranges, Stride, even_cuts
from baton.plan.tokens import Ints, count_below


@dataclass(frozen=True, slots=True)
class QuerySegment:
    """Query rows [first, last) are one sequence's, from position `start` on."""

    work: ScheduledSequence
    first: int
    last: int
    start: int
    own: Range
    """The rows of the step's keys from the work's first token to the segment's last."""

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.last - self.first

    @property
    def is_single(self) -> bool:
        """Whether it is one row: a decoding sequence."""
        return self.last - self.first == 1


@dataclass(frozen=True, slots=True)
class PageMap:
    """Maps the page tables of a pass to rows of a pool."""

    group: str
    num_units: int
    page_rows: int
    """From the first row of a page to that of the next."""
    keeping: Keeping
    device: torch.device

    def firsts(self, work: ScheduledSequence, slots: Ints) -> Ints:
        """The pool's row of the first unit of each slot; those of further units follow a page size apart."""
        table = np.asarray(work.pages.get(self.group, ()), dtype=np.int64)
        size = self.keeping.page_tokens
        nth, inside = np.divmod(slots, size)
        if len(nth) and nth[-1] >= len(table):
            raise EngineError(
                f"sequence {work.sequence} needs {nth[-1] + 1} pages of {self.group!r}, "
                f"its table has {len(table)}"
            )
        pages = table[nth]
        if (pages < 0).any():
            raise EngineError(f"sequence {work.sequence} reads a page of {self.group!r} that was given up")
        return np.asarray(pages * self.page_rows + inside, dtype=np.int64)

    def by_unit(self, firsts: Ints) -> Tensor:
        """(..., slots) -> (..., units, slots), flat and on the device: as keys are read."""
        return self.tensor(firsts[..., None, :] + self._steps[:, None])

    def by_slot(self, firsts: Ints) -> Tensor:
        """(slots) -> (slots, units), flat and on the device: as rows are stored."""
        return self.tensor(firsts[:, None] + self._steps)

    @property
    def _steps(self) -> Ints:
        return np.arange(self.num_units, dtype=np.int64) * self.keeping.page_tokens

    def tensor(self, slots: Ints) -> Tensor:
        """On the device, flat."""
        flat = torch.from_numpy(np.ascontiguousarray(slots).reshape(-1))
        return flat.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Writes:
    """Which rows of the step this rank stores (None: all), and where."""

    rows: Tensor | None
    slots: Tensor


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Several rows of one sequence and the keys that they see, at [lowest, stop) or at `positions`."""

    segment: QuerySegment
    lowest: int
    slots: Tensor | None
    """Where the keys lie; None where they are the step's own and need no reading."""
    num_keys: int
    positions: Tensor | None = None
    """Of the keys, where this rank keeps just a part of them."""
    bias: Tensor | None = None
    """(rows, keys) added to scores where rows choose what they attend to; None: they see all before them."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One row each of sequences of similar length."""

    rows: Tensor | None
    """Query rows; None where they are all rows."""
    slots: Tensor
    bias: Tensor | None
    shape: tuple[int, int, int]
    """Sequences, units, keys."""


@dataclass(frozen=True, slots=True)
class Reads:
    """All keys that the query rows of a pass see in one page-table group."""

    chunks: tuple[QueryChunk, ...]
    buckets: tuple[Bucket, ...]


def find_writes(pages: PageMap, works: Sequence[ScheduledSequence]) -> Writes:
    """Where the step's tokens go."""
    rows, slots = [], []
    row = 0
    for work in works:
        kept, at = pages.keeping.kept(work, (work.start, work.start + len(work.tokens)))
        rows.append(kept - work.start + row)
        slots.append(pages.firsts(work, at))
        row += len(work.tokens)
    if not rows:
        return Writes(None, torch.empty(0, dtype=torch.int64, device=pages.device))
    kept_rows = np.concatenate(rows)
    is_all = len(kept_rows) == row
    return Writes(None if is_all else pages.tensor(kept_rows), pages.by_slot(np.concatenate(slots)))


def find_reads(
    pages: PageMap, segments: Sequence[QuerySegment], window: int | None, dtype: torch.dtype
) -> Reads:
    """Where the keys of the segments lie; `dtype` is that of the masks."""
    chunks = tuple(_chunk(pages, segment, window) for segment in segments if not segment.is_single)
    singles = [_Single(pages, segment, window) for segment in segments if segment.is_single]
    held = [single for single in singles if len(single.slots)]
    num_rows = sum(segment.last - segment.first for segment in segments)
    buckets = tuple(_bucket(pages, part, num_rows, dtype) for part in _by_length(held))
    return Reads(chunks, buckets)


def _lowest(segment: QuerySegment, window: int | None) -> int:
    return 0 if window is None else max(0, segment.start - window + 1)


def _chunk(pages: PageMap, segment: QuerySegment, window: int | None) -> QueryChunk:
    lowest = _lowest(segment, window)
    if not pages.keeping.is_whole:
        positions, slots = pages.keeping.kept(segment.work, (lowest, segment.stop))
        rows = pages.by_unit(pages.firsts(segment.work, slots))
        return QueryChunk(segment, lowest, rows, len(slots), pages.tensor(positions))
    if segment.work.start == 0:
        return QueryChunk(segment, 0, None, segment.stop)
    _, slots = pages.keeping.kept(segment.work, (lowest, segment.stop))
    return QueryChunk(segment, lowest, pages.by_unit(pages.firsts(segment.work, slots)), len(slots))


class _Single:
    """One decoding sequence: its query row and where its keys lie."""

    def __init__(self, pages: PageMap, segment: QuerySegment, window: int | None) -> None:
        self.row = segment.first
        _, slots = pages.keeping.kept(segment.work, (_lowest(segment, window), segment.stop))
        self.slots = pages.firsts(segment.work, slots)


def _by_length(singles: list[_Single]) -> list[list[_Single]]:
    """Sequences whose lengths are less than a factor of two apart, each part in the order of rows."""
    parts: list[list[_Single]] = []
    for single in sorted(singles, key=lambda single: len(single.slots)):
        if not parts or len(single.slots) > 2 * len(parts[-1][0].slots) + 64:
            parts.append([])
        parts[-1].append(single)
    return [sorted(part, key=lambda single: single.row) for part in parts]


def _bucket(pages: PageMap, singles: list[_Single], num_rows: int, dtype: torch.dtype) -> Bucket:
    lengths = np.array([len(single.slots) for single in singles])
    longest = int(lengths.max())
    shape = (len(singles), pages.num_units, longest)
    firsts = np.empty((len(singles), longest), dtype=np.int64)
    for i, single in enumerate(singles):
        firsts[i, : lengths[i]] = single.slots
        firsts[i, lengths[i] :] = single.slots[0]
    bias = None
    if int(lengths.min()) < longest:
        hidden = np.arange(longest)[None, None] >= lengths[:, None, None]
        numbers = np.where(hidden, np.float32("-inf"), np.float32(0))
        bias = torch.from_numpy(numbers).to(pages.device, dtype, non_blocking=True)
    rows = np.array([single.row for single in singles], dtype=np.int64)
    return Bucket(None if len(rows) == num_rows else pages.tensor(rows), pages.by_unit(firsts), bias, shape)


# Which rows a cp rank computes, and which tokens of a sequence it keeps.


_END = 1 << 40


@dataclass(frozen=True, slots=True)
class RankRows:
    """Which cp rank computes which rows of a batch: each a part, or each all."""

    count: int
    cuts: Ranges
    is_dealt: bool

    @property
    def sizes(self) -> list[int]:
        """Rows of each cp rank."""
        return [last - first for first, last in self.cuts]


def deal_rows(count: int, num_ranks: int) -> RankRows:
    """Rows are divided if every cp rank gets at least two; all ranks get the same result."""
    is_dealt = num_ranks > 1 and count >= 2 * num_ranks
    cuts = even_cuts(count, num_ranks, extra_first=True) if is_dealt else ((0, count),) * num_ranks
    return RankRows(count, cuts, is_dealt)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which tokens one cp rank keeps, and in which of its slots."""

    scheme: Scheme
    index: int
    count: int
    page_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether every rank keeps every token."""
        return self.scheme.num_shares(self.count) == 1

    def kept(self, work: ScheduledSequence, wanted: Range) -> tuple[Ints, Ints]:
        """The kept tokens of a range of positions, and their slots."""
        positions = np.arange(*wanted, dtype=np.int64)
        if self.is_whole:
            return positions, positions
        if not isinstance(self.scheme, Split):
            return _members(self.scheme.share(self.index, self.count, _END, self.page_tokens), positions)
        share = self.scheme.share(self.index, self.count, work.prompt_tokens, self.page_tokens)
        kept, slots = _members(share, positions)
        if self.index < self.count - 1:
            return kept, slots
        # What is generated after a split prompt follows the last rank's own part of it.
        later = positions[positions >= work.prompt_tokens]
        after = later - work.prompt_tokens + share.num_below(work.prompt_tokens)
        return np.concatenate((kept, later)), np.concatenate((slots, after))


def _members(stride: Stride, positions: Ints) -> tuple[Ints, Ints]:
    inside = (positions >= stride.start) & (positions < stride.stop)
    if not stride.is_whole:
        inside &= (positions - stride.phase) % stride.period < stride.block
    members = positions[inside]
    return members, count_below(stride, members)


# What rows attend with, and their answers put together again.


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The pools of a layer as rows of channels, and where they are read to; a latent is its own value."""

    keys: Tensor
    values: Tensor
    scratch: Scratch

    def read(self, slots: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at `slots`, shaped (*shape, channels), until the next reading."""
        k = self.scratch.read("keys", self.keys, slots).to(dtype)
        k = torch.unflatten(k, 0, shape)
        if self.values is self.keys:
            return k, k
        v = self.scratch.read("values", self.values, slots).to(dtype)
        return k, torch.unflatten(v, 0, shape)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Queries (rows, heads, c), the step's own keys and values (units, rows, c), and what is stored."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: CachedRows

    def of_chunk(self, chunk: QueryChunk) -> ChunkInputs:
        """What a chunk attends with."""
        part = chunk.segment
        q = self.q
        if part.last - part.first < q.shape[0]:
            q = q[part.first : part.last]
        if chunk.slots is None and part.own == (0, self.k.shape[1]):
            return ChunkInputs(q, self.k, self.v)
        if chunk.slots is None:
            return ChunkInputs(q, self.k[:, part.own[0] : part.own[1]], self.v[:, part.own[0] : part.own[1]])
        return ChunkInputs(q, *self.stored.read(chunk.slots, (-1, chunk.num_keys), self.q.dtype))

    def of_bucket(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """What a bucket attends with."""
        q = self.q if bucket.rows is None else self.q.index_select(0, bucket.rows)
        return q, *self.stored.read(bucket.slots, bucket.shape, self.q.dtype)


class AttentionOutput:
    """The rows' results put together; a result that is all rows is taken as it is."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """(rows, heads, channels)."""
        assert self._whole is not None, "a pass without rows attends to nothing"
        return self._whole

    def put_chunk(self, chunk: QueryChunk, mixed: Tensor) -> None:
        """The rows of a chunk."""
        first, last = chunk.segment.first, chunk.segment.last
        if last - first == self._num_rows:
            self._whole = mixed
        else:
            self._room(mixed)[first:last] = mixed

    def put_bucket(self, bucket: Bucket, mixed: Tensor) -> None:
        """The rows of a bucket."""
        if bucket.rows is None:
            self._whole = mixed
        else:
            self._room(mixed).index_copy_(0, bucket.rows, mixed)

    def _room(self, like: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = like.new_empty((self._num_rows, *like.shape[1:]))
        return self._whole
