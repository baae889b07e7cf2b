"""Attention of a step in which every sequence decodes one token, on a GPU; see `baton.engine.models.base`.

The kernels read pages in place, by tables that lie on the device. `DecodeInputs` has them: the tokens,
lengths and page tables of a batch, which one copy brings from pinned host memory. A pass is made of views of
it, so that a CUDA graph that was captured with a pass computes whatever the inputs hold when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from baton.engine.attention import paged
from baton.engine.attention.paged import PageTable
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.models.base import HeadOptions, IndexQuery, LatentQuery, Recurrence
from baton.errors import EngineError
from baton.plan.cache import Component


def is_decoding(batch: ScheduledBatch) -> bool:
    """Whether every sequence computes one token of its answer, and nothing else is to be done."""
    return bool(batch.sequences) and all(map(_is_decoding, batch.sequences))


def _is_decoding(work: ScheduledSequence) -> bool:
    # The last row of a prompt may have to be handed over layer by layer: it is not decoded here.
    is_one = len(work.tokens) == 1 and work.num_samples > 0 and work.start >= work.prompt_tokens
    return is_one and work.embeddings is None and work.hidden is None


class DecodeInputs:
    """Inputs of decode steps of up to `rows_max` sequences, on the host and on the device."""

    def __init__(self, groups: Sequence[str], rows_max: int, pages_max: int, device: torch.device) -> None:
        self._groups = tuple(groups)
        self._rows_max = rows_max
        self._pages_max = pages_max
        size = rows_max * (2 + len(self._groups) * pages_max)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._listed: dict[tuple[str, int], list[int]] = {}
        """The pages in each row of the tables, by group and row."""
        self._listed_rows = 0
        """The number of rows that the tables were last filled for."""

    def fill(self, batch: ScheduledBatch, num_rows: int) -> None:
        """Brings a batch to the device, padded to `num_rows`, without waiting."""
        works = batch.sequences
        if not len(works) <= num_rows <= self._rows_max:
            raise EngineError(
                f"{len(works)} sequences in a decode step of {num_rows} rows; at most {self._rows_max} fit"
            )
        if num_rows != self._listed_rows:
            self._listed, self._listed_rows = {}, num_rows
        host = self._host.numpy()
        host[: 2 * num_rows] = 0
        host[: len(works)] = [work.tokens[0] for work in works]
        host[num_rows : num_rows + len(works)] = [work.start + 1 for work in works]
        for row, work in enumerate(works):
            for index, group in enumerate(self._groups):
                pages = work.pages.get(group, [])
                if self._listed.get((group, row)) == pages:
                    continue
                if len(pages) > self._pages_max:
                    raise EngineError(
                        f"sequence {work.sequence} has {len(pages)} pages of {group!r}, "
                        f"{self._pages_max} is the most that a context has"
                    )
                first = 2 * num_rows + (index * num_rows + row) * self._pages_max
                host[first : first + len(pages)] = pages
                self._listed[group, row] = pages
        used = num_rows * (2 + len(self._groups) * self._pages_max)
        self._device[:used].copy_(self._host[:used], non_blocking=True)

    def tokens(self, num_rows: int) -> Tensor:
        """(rows,) int32; 0 for padding."""
        return self._device[:num_rows]

    def lengths(self, num_rows: int) -> Tensor:
        """(rows,) int32: tokens of each sequence, its new one included; 0 for padding."""
        return self._device[num_rows : 2 * num_rows]

    def tables(self, num_rows: int, page_tokens: int) -> dict[str, PageTable]:
        """By page-table group."""
        tables = {}
        for index, group in enumerate(self._groups):
            first = 2 * num_rows + index * num_rows * self._pages_max
            pages = self._device[first : first + num_rows * self._pages_max].view(num_rows, self._pages_max)
            tables[group] = PageTable(pages, self.lengths(num_rows), page_tokens)
        return tables


class PagedPass:
    """Attention of one decode step; every sequence of the batch is one row."""

    def __init__(self, inputs: DecodeInputs, num_rows: int, pools: CachePools) -> None:
        self._pools = pools
        self._num_rows = num_rows
        self._tables = inputs.tables(num_rows, pools.spec.storage.page_tokens)
        self.tokens = inputs.tokens(num_rows).long()
        self.positions = (inputs.lengths(num_rows) - 1).clamp_min(0).long()
        """(rows,) int64: each row's position in its sequence; 0 for padding."""

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: HeadOptions) -> Tensor:
        """Stores k and v, attends causally with q; all are (rows, heads of this rank, dim)."""
        table = self._table(self._pools.component("k", layer), options.window, layer)
        keys, values = self._pools.view("k", layer), self._pools.view("v", layer)
        paged.store(k, keys, table)
        paged.store(v, values, table)
        if q.shape[1] == 0:
            return q.new_empty((len(q), 0, v.shape[-1]))
        return paged.attend(q, keys, values, table, options, self._splits(k.shape[1]))

    def latent(
        self,
        layer: int,
        query: LatentQuery,
        latent: Tensor,
        scale: float,
        chosen_by: IndexQuery | Literal["shared"] | None = None,
    ) -> Tensor:
        """Stores latent (rows, channels), attends causally; returns (rows, heads, value channels)."""
        if chosen_by is not None:
            raise EngineError(f"layer {layer} chooses its tokens, which no kernel does; use the general pass")
        component = self._pools.component("latent", layer)
        table, pool = (
            self._table(component, component.extent.window, layer),
            self._pools.view("latent", layer),
        )
        paged.store(latent.unsqueeze(1), pool.unsqueeze(1), table)
        q = query.absorbed()
        if q.shape[1] == 0:
            return query.project(q[..., : query.num_value_channels])
        options = HeadOptions(scale, component.extent.window)
        splits = self._splits(-(-q.shape[1] // 16))
        return query.project(paged.attend_latent(q, pool, query.num_value_channels, table, options, splits))

    def recur(self, layer: int, rows: Tensor, rule: Recurrence) -> Tensor:
        """No kernel does it."""
        raise EngineError(f"layer {layer} is recurrent, which no kernel does; use the general pass")

    def total(self, x: Tensor) -> Tensor:
        """Only recurrent mixers ask for it."""
        raise EngineError("a norm over all heads, which no kernel does; use the general pass")

    def _table(self, component: Component, window: int | None, layer: int) -> PageTable:
        if component.extent.window != window:
            raise EngineError(
                f"layer {layer} attends over a window of {window}, its cache keeps "
                f"{component.extent.window}; the plan and the model read the config differently"
            )
        return self._tables[component.group]

    def _splits(self, num_programs: int) -> int:
        return paged.num_splits(max(1, self._num_rows * num_programs), self._pools.device)
