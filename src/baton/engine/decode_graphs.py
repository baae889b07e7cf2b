"""Decode steps on a GPU: paged kernels, and CUDA graphs of whole steps by batch size.

A decode step of a small batch is short, and launching its kernels one by one takes several times as long as
computing them. So the step of each batch size in `graph_sizes` is captured once, at the start, and replayed
with new inputs; a batch between two sizes is padded to the larger. Ranks that exchange rows during a step
launch it kernel by kernel, and so do mixtures of experts, whose choice the host has to know. A step that also
prefills is not a decode step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.attention.paged_pass import DecodeInputs, PagedPass, is_decoding
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch


def graph_sizes(rows_max: int) -> list[int]:
    """The batch sizes that are captured: padding is at most a half, and at most a quarter from 8 on."""
    sizes, size = [], 1
    while size < rows_max:
        sizes.append(size)
        size += max(1, size // 4 if size >= 8 else size // 2)
    return [*sizes, rows_max]


class DecodeGraphs:
    """The decode steps of one rank."""

    def __init__(self, pools: CachePools, rows_max: int, context_max: int) -> None:
        self._pools = pools
        self._rows_max = rows_max
        groups = sorted({component.group for component in pools.spec.cache.components})
        pages_max = -(-context_max // pools.spec.storage.page_tokens)
        self._inputs = DecodeInputs(groups, rows_max, pages_max, pools.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """By number of rows: the graph and the logits that it writes."""
        self._sizes: list[int] = []

    def fits(self, batch: ScheduledBatch) -> bool:
        """Whether a batch is a decode step."""
        return len(batch.sequences) <= self._rows_max and is_decoding(batch)

    def begin(self, batch: ScheduledBatch) -> PagedPass:
        """The pass of a step that is launched kernel by kernel."""
        num_rows = len(batch.sequences)
        self._inputs.fill(batch, num_rows)
        return PagedPass(self._inputs, num_rows, self._pools)

    def has_graph(self, batch: ScheduledBatch) -> bool:
        """Whether the step of a batch was captured."""
        return bool(self._sizes) and len(batch.sequences) <= self._sizes[-1]

    def replay(self, batch: ScheduledBatch) -> Tensor:
        """The logits of a captured step (rows, vocabulary), until the next one."""
        num_rows = self._sizes[bisect_left(self._sizes, len(batch.sequences))]
        graph, logits = self._graphs[num_rows]
        self._inputs.fill(batch, num_rows)
        graph.replay()
        return logits[: len(batch.sequences)]

    def capture(self, step: Callable[[PagedPass], Tensor]) -> None:
        """Captures `step`, from a pass to logits, for every batch size.

        The inputs are all padding meanwhile, so that nothing is stored.
        """
        stream, pool = torch.cuda.Stream(self._pools.device), None  # type: ignore[no-untyped-call]
        # The largest first: the smaller ones use its memory.
        for num_rows in reversed(graph_sizes(self._rows_max)):
            self._inputs.fill(ScheduledBatch(), num_rows)
            torch.cuda.synchronize(self._pools.device)
            with torch.cuda.stream(stream):
                # Kernels are compiled, and libraries take their workspaces, outside of a capture.
                step(PagedPass(self._inputs, num_rows, self._pools))
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = step(PagedPass(self._inputs, num_rows, self._pools))
            pool = pool or graph.pool()
            self._graphs[num_rows] = (graph, logits)
        self._sizes = sorted(self._graphs)
