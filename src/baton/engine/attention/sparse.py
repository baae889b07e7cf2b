"""Which tokens the rows of a sparse mixer attend to: those with the highest index scores.

Theory. Index keys have a pool of their own with the same slots as the latent, so the slots of a pass are
computed once for both. Every row scores the tokens that it may see and chooses those with the highest scores.
A decoding row then reads only what it chose; the rows of a chunk read all keys, with the others masked.

If cp ranks keep parts of the tokens, each takes the best of its own, as many as are wanted in total. The
scores are gathered, every rank finds the best of all in the same way, and each keeps those that it owns. So
exactly as many tokens are chosen as on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.attention import softmax
from baton.engine.attention.prefill import seen
from baton.engine.attention.slots import Bucket, CachedRows, QueryChunk, Reads
from baton.engine.models.base import IndexQuery
from baton.engine.parallel import RankGroup

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Chooser:
    """The index queries of the rows that attend, and where index keys lie."""

    query: IndexQuery
    """Of the rows that attend; its keys are those of the whole step."""
    stored: CachedRows
    cp: RankGroup | None
    """The ranks that keep parts of the tokens; None where each keeps all."""

    def choose(self, reads: Reads, num_seen: int) -> Reads:
        """The same reads, narrowed to what is chosen; rows see at most `num_seen` tokens, on all ranks."""
        if num_seen <= self.query.num_chosen:
            return reads
        chunks = [self._best(self._of_chunk(chunk)) for chunk in reads.chunks]
        buckets = [self._best(self._of_bucket(bucket)) for bucket in reads.buckets]
        if self.cp is not None:
            self._agree(reads, chunks, buckets)
        return replace(
            reads,
            chunks=tuple(map(self._hidden, reads.chunks, chunks)),
            buckets=tuple(map(self._narrowed, reads.buckets, buckets)),
        )

    def _of_chunk(self, chunk: QueryChunk) -> Tensor:
        """(rows, keys): minus infinity for what comes later."""
        part = chunk.segment
        queries, weights = self._rows(slice(part.first, part.last))
        own = self.query.keys[part.own[0] : part.own[1]]
        keys = own if chunk.slots is None else self._read(chunk.slots)
        at = torch.arange(part.start, part.stop, device=keys.device)
        places = chunk.positions
        if places is None:
            places = torch.arange(chunk.lowest, chunk.lowest + chunk.num_keys, device=keys.device)
        scores = _scores(queries.unsqueeze(0), keys.unsqueeze(0), weights.unsqueeze(0))
        return scores.squeeze(0) + seen(at, places, None, torch.float32)

    def _of_bucket(self, bucket: Bucket) -> Tensor:
        """(sequences, keys): minus infinity for padding."""
        queries, weights = self._rows(slice(None) if bucket.rows is None else bucket.rows)
        num_sequences, _, num_keys = bucket.shape
        keys = self._read(bucket.slots).view(num_sequences, num_keys, -1)
        scores = _scores(queries.unsqueeze(1), keys, weights.unsqueeze(1)).squeeze(1)
        return scores if bucket.bias is None else scores + bucket.bias.squeeze(1).float()

    def _rows(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.query.queries[rows], self.query.weights[rows]

    def _read(self, slots: Tensor) -> Tensor:
        return self.stored.read(slots, (-1,), self.query.queries.dtype)[0]

    def _best(self, scores: Tensor) -> Best:
        best = scores.topk(min(self.query.num_chosen, scores.shape[-1]), dim=-1)
        return Best(best.values, best.indices, scores.shape[-1])

    def _agree(self, reads: Reads, chunks: list[Best], buckets: list[Best]) -> None:
        """Removes from this rank's best what is not among the best of all ranks."""
        assert self.cp is not None
        num_rows, num_chosen = len(self.query.queries), self.query.num_chosen
        mine = self.query.weights.new_full((num_rows, num_chosen), _HIDDEN)
        placed: list[tuple[slice | Tensor, Best]] = []
        for chunk, best in zip(reads.chunks, chunks, strict=True):
            placed.append((slice(chunk.segment.first, chunk.segment.last), best))
        for bucket, best in zip(reads.buckets, buckets, strict=True):
            placed.append((slice(None) if bucket.rows is None else bucket.rows, best))
        for rows, best in placed:
            mine[rows, : best.scores.shape[1]] = best.scores
        every = self.cp.stack(mine).transpose(0, 1).flatten(1)
        is_best = torch.zeros_like(every, dtype=torch.bool)
        is_best.scatter_(1, every.topk(num_chosen, dim=1).indices, True)
        first = self.cp.index * num_chosen
        is_mine = is_best[:, first : first + num_chosen]
        for rows, best in placed:
            best.scores.masked_fill_(~is_mine[rows, : best.scores.shape[1]], _HIDDEN)

    def _hidden(self, chunk: QueryChunk, best: Best) -> QueryChunk:
        """The chunk with everything masked that is not chosen."""
        bias = best.bias(self.query.queries.dtype)
        every = bias.new_full((len(bias), best.num_keys), _HIDDEN)
        return replace(chunk, bias=every.scatter_(1, best.places, bias))

    def _narrowed(self, bucket: Bucket, best: Best) -> Bucket:
        """The bucket with only what is chosen to be read."""
        num_sequences, _, num_keys = bucket.shape
        slots = bucket.slots.view(num_sequences, num_keys).gather(1, best.places)
        bias = best.bias(self.query.queries.dtype).unsqueeze(1)
        return Bucket(bucket.rows, slots.flatten(), bias, (num_sequences, 1, best.places.shape[1]))


@dataclass(frozen=True, slots=True)
class Best:
    """The best keys of rows, by score and place, (rows, keys) each; minus infinity where none is chosen."""

    scores: Tensor
    places: Tensor
    num_keys: int

    def bias(self, dtype: torch.dtype) -> Tensor:
        """(rows, best keys): zero for what is chosen."""
        hidden = self.scores == _HIDDEN
        return torch.zeros_like(self.scores, dtype=dtype).masked_fill_(hidden, _HIDDEN)


def _scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """queries (n, rows, heads, c), keys (n, keys, c), weights (n, rows, heads) -> (n, rows, keys)."""
    num_heads = queries.shape[2]
    flat, weights = queries.float().flatten(1, 2), weights.unsqueeze(2)
    step = max(1, softmax.SCORES_MAX // max(1, keys.shape[0] * keys.shape[1] * num_heads))
    parts = []
    for first in range(0, queries.shape[1], step):
        last = min(first + step, queries.shape[1])
        products = torch.matmul(flat[:, first * num_heads : last * num_heads], keys.float().mT).relu_()
        shaped = torch.unflatten(products, 1, (last - first, num_heads))
        parts.append(torch.matmul(weights[:, first:last], shaped).squeeze(2))
    return torch.cat(parts, 1)
