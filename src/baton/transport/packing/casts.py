"""Rows whose element type changes on the way, with or without a scale per page.

Every number is converted as baton.plan.dtypes does it, bit for bit: nearest even, fp8 saturating at 448.
A NaN becomes some NaN: torch's own kernels disagree among themselves on its sign and payload.

fp8 with a scale per page means: number = element * scale of its page. From fp8, every element is multiplied
by the scale that came with its page. To fp8, this code computes the scale of a page from the largest finite
number of the spans that this step brings for it; that number becomes 448. A page that arrives by several
steps (from several sources, or in chunks) would need one scale before all of it is there; give each such
part its own entry in `values`, and treat the part as a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton.plan.dtypes import item_bytes
from baton.plan.steps import Spans, Unpack
from baton.plan.tokens import Ints
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
        read = self.read(staging)
        converted = torch.empty(self._shape, dtype=self._dtypes[1], device=read.device)
        cast_into(read, converted)
        self.write(converted, target)

    def read(self, staging: Tensor) -> Tensor:
        """The rows as a matrix of the source's elements; a view of staging if possible."""
        num_bytes = self._shape[0] * self._shape[1] * self._items[0]
        if self._is_one_piece and self._is_typed(staging, 0):
            gathered = staging[self._starts[0] : self._starts[0] + num_bytes]
        else:
            gathered = torch.empty(num_bytes, dtype=torch.uint8, device=staging.device)
            self._gather.run(staging, gathered)
        return gathered.view(self._dtypes[0]).view(self._shape)

    def write(self, converted: Tensor, target: Tensor) -> None:
        """Writes a matrix of the target's elements into place."""
        self._scatter.run(converted.view(torch.uint8).view(-1), target)

    def _is_typed(self, buffer: Tensor, end: int) -> bool:
        """Whether the rows of one end lie on whole elements in this buffer."""
        return self._on_elements[end] and buffer_alignment(buffer) >= self._items[end]


def cast_into(source: Tensor, target: Tensor) -> None:
    """Writes numbers into a tensor of another element type."""
    # Before 2.12 torch converts numbers beyond e4m3 to NaN; 448 exists in every other type.
    target.copy_(source.clamp(-FP8_MAX, FP8_MAX) if target.dtype == FP8 else source)


@dataclass(frozen=True, slots=True)
class Scales:
    """A float32 per page, on the device of the buffers, and the page that each span of a step belongs to.

    An Unpack from fp8 reads `values`; an Unpack to fp8 writes the values of its own pages only.
    """

    values: Tensor
    pages: Ints


def cut_by_page(step: Unpack, page_bytes: int) -> tuple[Unpack, Ints]:
    """The step with no span across a multiple of `page_bytes` in the target, and the page of each span.

    Spans of neighbouring pages may have been joined into one; a scale needs them apart.
    """
    source_item, target_item = (item_bytes(dtype) for dtype in step.dtypes)
    assert page_bytes % target_item == 0, "a page holds whole elements"
    spans = step.spans
    stop = spans.target + spans.length // source_item * target_item
    first = spans.target // page_bytes
    counts = (stop - 1) // page_bytes - first + 1
    span = np.repeat(np.arange(len(spans)), counts)
    nth = np.arange(len(span), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    pages = first[span] + nth
    target = np.maximum(spans.target[span], pages * page_bytes)
    length = (np.minimum(stop[span], (pages + 1) * page_bytes) - target) // target_item * source_item
    source = spans.source[span] + (target - spans.target[span]) // target_item * source_item
    return replace(step, spans=Spans(source, target, length)), pages


class ScaledCasts:
    """The casts of one step, between fp8 under scales and another element type."""

    def __init__(self, step: Unpack, pages: Ints, uploads: Uploads) -> None:
        source, target = (DTYPES[dtype] for dtype in step.dtypes)
        assert (source == FP8) != (target == FP8), "scales are for going to or from fp8"
        assert len(pages) == len(step.spans), "one page for each span"
        assert pages.min(initial=0) >= 0, "pages count from 0"
        self._target_dtype = target
        used, nth_page = np.unique(pages, return_inverse=True)
        self.num_pages_min = int(used[-1]) + 1 if len(used) else 0
        self._pages = uploads.put(used)
        self._casts = [
            (Cast(rows, step.dtypes, uploads), uploads.put(nth_page[rows.span]))
            for rows in cast_rows(step.spans, step.dtypes, uploads.device)
        ]

    def run(self, staging: Tensor, target: Tensor, values: Tensor) -> None:
        """Converts every row on the current stream, reading or writing the scales."""
        matrices = [(cast, cast.read(staging), page) for cast, page in self._casts]
        if self._target_dtype != FP8:
            scale = values.index_select(0, self._pages)
            for cast, rows, page in matrices:
                product = rows.float() * scale.index_select(0, page)[:, None]
                cast.write(product.to(self._target_dtype), target)
            return
        scale = self._measure([(rows, page) for _, rows, page in matrices], values)
        for cast, rows, page in matrices:
            quotient = rows.float() / scale.index_select(0, page)[:, None]
            converted = torch.empty(quotient.shape, dtype=FP8, device=quotient.device)
            cast_into(quotient, converted)
            cast.write(converted, target)

    def _measure(self, matrices: list[tuple[Tensor, Tensor]], values: Tensor) -> Tensor:
        """The scale of every page of this step; also written to `values`."""
        peak = torch.zeros(len(self._pages), dtype=torch.float32, device=values.device)
        for rows, page in matrices:
            finite = torch.nan_to_num(rows.float(), nan=0.0, posinf=0.0, neginf=0.0)
            peak.scatter_reduce_(0, page, finite.abs().amax(1), "amax")
        # Divide by a tensor: on a GPU torch divides by a scalar by its reciprocal, which rounds differently.
        scale = peak / torch.full_like(peak, FP8_MAX)
        # A page of zeros, or of numbers so small that the scale underflows, gets the scale 1.
        scale = torch.where(scale > 0, scale, 1.0)
        values.index_copy_(0, self._pages, scale)
        return scale
