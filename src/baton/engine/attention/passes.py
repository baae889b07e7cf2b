"""Attention of one forward pass on one rank, as the mixers of its layers use it.

Theory. The rows of a batch are stored one sequence after another. With context parallelism a rank computes a
part of the rows if there are enough of them (keys and values are then gathered over cp before they are
stored), otherwise all. It stores the tokens that its layout assigns to it. If every rank keeps all tokens,
each attends with its own rows. If ranks keep parts, each attends with all rows over its own tokens, and the
results are merged by their weights.

Where rows are stored and read depends on the batch alone, so it is computed once per pass and page-table
group, at the first layer that needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention import decode, prefill, slots, softmax
from baton.engine.attention.pools import FP8, CachePools, movable
from baton.engine.attention.prefill import ChunkInputs, Masks, Sight
from baton.engine.attention.slots import (
    AttentionInputs,
    AttentionOutput,
    CachedRows,
    Keeping,
    PageMap,
    QueryChunk,
    QuerySegment,
    RankRows,
    Reads,
    Writes,
    deal_rows,
)
from baton.engine.attention.softmax import Partial
from baton.engine.attention.sparse import Chooser
from baton.engine.attention.states import PassStates
from baton.engine.commands import ScheduledBatch
from baton.engine.models.base import HeadOptions, IndexQuery, LatentQuery, Recurrence
from baton.engine.parallel import Mesh
from baton.errors import EngineError
from baton.plan.cache import Component
from baton.plan.ranges import Range

FP8_MAX = torch.finfo(FP8).max
ABSORBED_RATIO = 8
"""A chunk this many times shorter than its context attends to the latent itself: expanding costs more."""


class Pass:
    """Attention of one step on one rank; see `baton.engine.models.base.Attention`."""

    def __init__(self, batch: ScheduledBatch, mesh: Mesh, pools: CachePools) -> None:
        self._batch = batch
        self._pools = pools
        self._cp = mesh.cp
        self._states = PassStates(batch, pools, mesh.tp)
        self.rows: RankRows = deal_rows(batch.num_rows, mesh.cp.size)
        spec = pools.spec
        self._keeping = Keeping(spec.layout.scheme, mesh.cp.index, mesh.cp.size, spec.storage.page_tokens)
        self._segments = _segments(batch, self._own if self._keeping.is_whole else (0, self.rows.count))
        self._masks = Masks(pools.device)
        self._writes_of: dict[tuple[str, tuple[int, int]], Writes] = {}
        self._reads: dict[tuple[str, tuple[int, int], int | None, torch.dtype], Reads] = {}
        self._choice: Reads | None = None
        """What the last indexer chose."""
        places = [np.arange(work.start, work.start + len(work.tokens)) for work in batch.sequences]
        every = np.concatenate([np.empty(0, dtype=np.int64), *places])
        self._positions = torch.from_numpy(every).to(pools.device, non_blocking=True)
        self.positions = self._positions[self._own[0] : self._own[1]]
        """(rows,) int64: each row's position in its sequence."""

    @property
    def _own(self) -> Range:
        """The rows of the batch that this rank computes."""
        return self.rows.cuts[self._cp.index]

    def recur(self, layer: int, rows: Tensor, rule: Recurrence) -> Tensor:
        """Carries every sequence of the pass on from its state; dealt rows are gathered for it."""
        if not self.rows.is_dealt:
            return self._states.recur(layer, rows, rule)
        every = self._states.recur(layer, self._cp.gather(rows, self.rows.sizes), rule)
        return every[self._own[0] : self._own[1]]

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over tp."""
        return self._states.total(x)

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: HeadOptions) -> Tensor:
        """Stores k and v, attends causally with q; all are (rows, heads of this rank, dim)."""
        component = self._pools.component("k", layer)
        (keys, page_rows), (values, _) = self._pools.rows("k", layer), self._pools.rows("v", layer)
        form, window = (k.shape[1], page_rows), options.window
        if component.extent.window != window:
            raise EngineError(
                f"layer {layer} attends over {_window_text(window)}, its cache keeps "
                f"{_window_text(component.extent.window)}; "
                "the plan and the model read the config differently"
            )
        if self.rows.is_dealt:
            q, k, v = self._gathered(q, k, v)
        if (both := self._pools.side_by_side(layer)) is not None:
            _store(both, self._writes(component, (2 * k.shape[1], page_rows)), torch.cat((k, v), 1))
        else:
            writes = self._writes(component, form)
            _store(keys, writes, k)
            _store(values, writes, v)
        if q.shape[1] == 0:
            return q.new_empty((self._own[1] - self._own[0], 0, v.shape[-1]))
        reads = self._read(component, form, window, q.dtype)
        source = AttentionInputs(
            q, k.transpose(0, 1), v.transpose(0, 1), CachedRows(keys, values, self._pools.scratch)
        )
        if self._keeping.is_whole:
            return self._attend(source, reads, options)
        part = self._merged(source, reads, options)
        out = part.out if options.sinks is None else softmax.with_sinks(part, options.sinks)
        return out.to(q.dtype)

    def latent(
        self,
        layer: int,
        query: LatentQuery,
        latent: Tensor,
        scale: float,
        chosen_by: IndexQuery | Literal["shared"] | None = None,
    ) -> Tensor:
        """Stores latent (rows, channels), attends causally; returns (rows, heads, value channels)."""
        component = self._pools.component("latent", layer)
        rows, page_rows = self._pools.rows("latent", layer)
        pool = CachedRows(rows, rows, self._pools.scratch)
        every = self._cp.gather(latent, self.rows.sizes) if self.rows.is_dealt else latent
        _store(rows, self._writes(component, (1, page_rows)), every)
        options = HeadOptions(scale, component.extent.window)
        reads = self._read(component, (1, page_rows), options.window, latent.dtype)
        if chosen_by == "shared":
            assert self._choice is not None, f"layer {layer} has no indexer before it on this stage"
            reads = self._choice
        elif chosen_by is not None:
            reads = self._choice = self._chosen(layer, chosen_by, reads)
        if self._keeping.is_whole:
            return self._attend_latent(query, every, pool, (reads, options))
        q = query.absorbed()
        if q.shape[1] == 0:
            return _headless(query, latent)
        if self.rows.is_dealt:
            q = self._cp.gather(q, self.rows.sizes)
        own = every.unsqueeze(0)
        part = self._merged(AttentionInputs(q, own, own, pool), reads, options)
        return query.project(part.out[..., : query.num_value_channels].to(latent.dtype))

    def _chosen(self, layer: int, query: IndexQuery, reads: Reads) -> Reads:
        """Stores index keys; returns the reads, narrowed to the tokens that the rows chose."""
        (rows, page_rows), is_whole = self._pools.rows("index_k", layer), self._keeping.is_whole
        if self.rows.is_dealt:
            query = replace(query, keys=self._cp.gather(query.keys, self.rows.sizes))
            if not is_whole:
                queries = self._cp.gather(query.queries, self.rows.sizes)
                weights = self._cp.gather(query.weights, self.rows.sizes)
                query = replace(query, queries=queries, weights=weights)
        _store(rows, self._writes(self._pools.component("index_k", layer), (1, page_rows)), query.keys)
        stored = CachedRows(rows, rows, self._pools.scratch)
        chooser = Chooser(query, stored, None if is_whole else self._cp)
        return chooser.choose(reads, max(segment.stop for segment in self._segments))

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of all cp ranks in one exchange; queries only where every rank attends with all of them."""
        parts = [k, v] if self._keeping.is_whole else [k, v, q]
        widths = [part[0].numel() for part in parts]
        every = self._cp.gather(torch.cat([part.flatten(1) for part in parts], 1), self.rows.sizes)
        shaped = [
            torch.unflatten(gathered, 1, part.shape[1:])
            for gathered, part in zip(torch.split_with_sizes(every, widths, 1), parts, strict=True)
        ]
        return (q if self._keeping.is_whole else shaped[2]), shaped[0], shaped[1]

    def _writes(self, component: Component, form: tuple[int, int]) -> Writes:
        """By units and rows of a page."""
        key = (component.group, form)
        if key not in self._writes_of:
            self._writes_of[key] = slots.find_writes(self._pages(component, form), self._batch.sequences)
        return self._writes_of[key]

    def _read(
        self, component: Component, form: tuple[int, int], window: int | None, dtype: torch.dtype
    ) -> Reads:
        key = (component.group, form, window, dtype)
        if key not in self._reads:
            pages = self._pages(component, form)
            self._reads[key] = slots.find_reads(pages, self._segments, window, dtype)
        return self._reads[key]

    def _pages(self, component: Component, form: tuple[int, int]) -> PageMap:
        return PageMap(component.group, *form, self._keeping, self._pools.device)

    def _attend(self, source: AttentionInputs, reads: Reads, options: HeadOptions) -> Tensor:
        answer = AttentionOutput(len(source.q))
        for chunk in reads.chunks:
            inputs = source.of_chunk(chunk)
            answer.put_chunk(chunk, prefill.attend(inputs, options.window, options, self._masks))
        for bucket in reads.buckets:
            q, k, v = source.of_bucket(bucket)
            answer.put_bucket(bucket, decode.attend(q, k, v, bucket.bias, options))
        return answer.whole

    def _attend_latent(
        self, query: LatentQuery, every: Tensor, pool: CachedRows, how: tuple[Reads, HeadOptions]
    ) -> Tensor:
        reads, options = how
        own = every.unsqueeze(0)
        wide = [chunk for chunk in reads.chunks if not _is_short(chunk)]
        short = [chunk for chunk in reads.chunks if _is_short(chunk)]
        answer = AttentionOutput(self._own[1] - self._own[0])
        num_values = query.num_value_channels
        if wide:
            plain = AttentionInputs(query.plain(), own, own, pool)
            if plain.q.shape[1] == 0:
                return _headless(query, plain.q)
            for chunk in wide:
                inputs = plain.of_chunk(chunk)
                keys, values = query.expand(inputs.k[0])
                expanded = ChunkInputs(inputs.q, keys.transpose(0, 1), values.transpose(0, 1))
                answer.put_chunk(chunk, self._over(chunk, expanded, options))
        if short or reads.buckets:
            absorbed = AttentionInputs(query.absorbed(), own, own, pool)
            if absorbed.q.shape[1] == 0:
                return _headless(query, absorbed.q)
            for chunk in short:
                mixed = self._over(chunk, absorbed.of_chunk(chunk), options)
                answer.put_chunk(chunk, query.project(mixed[..., :num_values]))
            for bucket in reads.buckets:
                q, k, v = absorbed.of_bucket(bucket)
                mixed = decode.attend(q, k, v, bucket.bias, options)
                answer.put_bucket(bucket, query.project(mixed[..., :num_values]))
        return answer.whole

    def _over(self, chunk: QueryChunk, inputs: ChunkInputs, options: HeadOptions) -> Tensor:
        """Attends with the rows of a chunk over the keys that they see."""
        if chunk.bias is not None:
            return prefill.attend_chosen(inputs, chunk.bias, options.scale)
        return prefill.attend(inputs, options.window, options, self._masks)

    def _merged(self, source: AttentionInputs, reads: Reads, options: HeadOptions) -> Partial:
        """Attends with all rows over this rank's tokens and merges over cp; returns this rank's rows."""
        q = source.q
        shape = (len(q), q.shape[1], source.v.shape[-1])
        # One tensor for both, since they travel together.
        both = q.new_zeros((*shape[:2], shape[2] + 1), dtype=torch.float32)
        out, weight = both[..., :-1], both[..., -1]
        weight.fill_(float("-inf"))
        for chunk in reads.chunks:
            first, last = chunk.segment.first, chunk.segment.last
            assert chunk.positions is not None
            if chunk.num_keys:
                sight = Sight(self._positions[first:last], chunk.positions, chunk.bias)
                part = prefill.attend_partly(source.of_chunk(chunk), sight, options)
                out[first:last], weight[first:last] = part.out, part.weight
        for bucket in reads.buckets:
            taken, k, v = source.of_bucket(bucket)
            part = decode.attend_partly(taken, k, v, bucket.bias, options)
            rows = slice(None) if bucket.rows is None else bucket.rows
            out[rows], weight[rows] = part.out, part.weight
        every = self._cp.stack(both)
        if self.rows.is_dealt:
            every = every[:, self._own[0] : self._own[1]]
        return softmax.merge(Partial(every[..., :-1], every[..., -1]))


def _segments(batch: ScheduledBatch, wanted: Range) -> list[QuerySegment]:
    """The sequences' rows that fall in a range of the batch's rows."""
    segments = []
    row = 0
    for work in batch.sequences:
        first, last = max(row, wanted[0]), min(row + len(work.tokens), wanted[1])
        if first < last:
            start = work.start + first - row
            segments.append(QuerySegment(work, first - wanted[0], last - wanted[0], start, (row, last)))
        row += len(work.tokens)
    return segments


def _window_text(window: int | None) -> str:
    return "all tokens" if window is None else f"a window of {window}"


def _headless(query: LatentQuery, like: Tensor) -> Tensor:
    """The result of a rank without query heads."""
    return query.project(like.new_empty((len(like), 0, query.num_value_channels)))


def _is_short(chunk: QueryChunk) -> bool:
    rows = chunk.segment.last - chunk.segment.first
    return rows * ABSORBED_RATIO <= chunk.num_keys


def _store(pool: Tensor, writes: Writes, rows: Tensor) -> None:
    kept = rows if writes.rows is None else rows.index_select(0, writes.rows)
    if pool.dtype == FP8:
        # Before 2.12 torch converts numbers beyond e4m3 to NaN.
        kept = kept.clamp(-FP8_MAX, FP8_MAX)
    movable(pool).index_copy_(0, writes.slots, movable(kept.reshape(-1, pool.shape[1]).to(pool.dtype)))
