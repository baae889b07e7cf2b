"""What rows attend with, and their answers put together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention.index import Bucket, Chunk
from baton.engine.attention.kernels.prefill import Inputs
from baton.engine.attention.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Stored:
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
class Source:
    """Queries (rows, heads, c), the step's own keys and values (units, rows, c), and what is stored."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: Stored

    def of_chunk(self, chunk: Chunk) -> Inputs:
        """What a chunk attends with."""
        part = chunk.segment
        q = self.q
        if part.last - part.first < q.shape[0]:
            q = q[part.first : part.last]
        if chunk.slots is None and part.own == (0, self.k.shape[1]):
            return Inputs(q, self.k, self.v)
        if chunk.slots is None:
            return Inputs(q, self.k[:, part.own[0] : part.own[1]], self.v[:, part.own[0] : part.own[1]])
        return Inputs(q, *self.stored.read(chunk.slots, (-1, chunk.num_keys), self.q.dtype))

    def of_bucket(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """What a bucket attends with."""
        q = self.q if bucket.rows is None else self.q.index_select(0, bucket.rows)
        return q, *self.stored.read(bucket.slots, bucket.shape, self.q.dtype)


class Answer:
    """The rows' results put together; a result that is all rows is taken as it is."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """(rows, heads, channels)."""
        assert self._whole is not None, "a pass without rows attends to nothing"
        return self._whole

    def put_chunk(self, chunk: Chunk, mixed: Tensor) -> None:
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
