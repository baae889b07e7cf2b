"""Rows whose element type changes on the way.

Every number is converted as baton.plan.dtypes does it, bit for bit: nearest even, fp8 saturating at 448.
A NaN becomes some NaN: torch's own kernels disagree among themselves on its sign and payload.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.plan.dtypes import item_bytes
from baton.plan.steps import Spans
from baton.transport.packing.moves import (
    Rows,
    Uploads,
    alignment,
    blocks,
    buffer_alignment,
    equal_rows,
    make_move,
    nested,
    nested_views,
    typed,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
FP8 = DTYPES["fp8"]
FP8_MAX = 448.0
HOST_BLOCK_BYTES = 1 << 20
"""What the host converts at once, so that the intermediate result stays in its cache."""


def cast_rows(spans: Spans, dtypes: tuple[str, str], device: torch.device) -> list[Rows]:
    """The spans as rows for casts, each set of a size that suits the device."""
    sets = equal_rows(spans, (item_bytes(dtypes[0]), item_bytes(dtypes[1])))
    if device.type != "cpu":
        return sets
    return [block for rows in sets for block in blocks(rows, HOST_BLOCK_BYTES)]


class Cast:
    """Rows read as one element type and written as another.

    If the rows lie in a nested pattern and on whole elements, this is one strided copy. Otherwise they are
    gathered (unless they are contiguous), converted, and moved into place as bytes.
    """

    def __init__(self, rows: Rows, dtypes: tuple[str, str], uploads: Uploads) -> None:
        self._items = (item_bytes(dtypes[0]), item_bytes(dtypes[1]))
        self._dtypes = (DTYPES[dtypes[0]], DTYPES[dtypes[1]])
        self._shape = (len(rows), rows.source_bytes // self._items[0])
        self._starts = (int(rows.source[0]), int(rows.target[0]))
        self._levels = nested(rows.source, rows.target)
        nth = np.arange(len(rows), dtype=np.int64)
        self._is_one_piece = bool((rows.source == rows.source[0] + nth * rows.source_bytes).all())
        self._gather = make_move(rows.source, nth * rows.source_bytes, rows.source_bytes, uploads)
        self._scatter = make_move(nth * rows.target_bytes, rows.target, rows.target_bytes, uploads)
        self._on_elements = (
            alignment(rows.source) >= self._items[0],
            alignment(rows.target) >= self._items[1],
        )

    def run(self, staging: Tensor, target: Tensor) -> None:
        """Converts every row on the current stream."""
        is_aligned = self._is_typed(staging, 0) and self._is_typed(target, 1)
        if self._levels is not None and is_aligned:
            ends = (typed(staging, self._dtypes[0]), typed(target, self._dtypes[1]))
            cast_into(*nested_views(*ends, self._starts, self._levels, self._shape[1]))
            return
        read = self._read(staging)
        converted = torch.empty(self._shape, dtype=self._dtypes[1], device=read.device)
        cast_into(read, converted)
        self._scatter.run(converted.view(torch.uint8).view(-1), target)

    def _read(self, staging: Tensor) -> Tensor:
        """The rows as a matrix of the source's elements; a view of staging if possible."""
        num_bytes = self._shape[0] * self._shape[1] * self._items[0]
        if self._is_one_piece and self._is_typed(staging, 0):
            gathered = staging[self._starts[0] : self._starts[0] + num_bytes]
        else:
            gathered = torch.empty(num_bytes, dtype=torch.uint8, device=staging.device)
            self._gather.run(staging, gathered)
        return gathered.view(self._dtypes[0]).view(self._shape)

    def _is_typed(self, buffer: Tensor, end: int) -> bool:
        """Whether the rows of one end lie on whole elements in this buffer."""
        return self._on_elements[end] and buffer_alignment(buffer) >= self._items[end]


def cast_into(source: Tensor, target: Tensor) -> None:
    """Writes numbers into a tensor of another element type."""
    # Before 2.12 torch converts numbers beyond e4m3 to NaN; 448 exists in every other type.
    target.copy_(source.clamp(-FP8_MAX, FP8_MAX) if target.dtype == FP8 else source)
