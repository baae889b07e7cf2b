"""fp8 with a scale per page: number = element * scale of its page.

From fp8, every element is multiplied by the scale that came with its page. To fp8, the scale of a page is
made here, from the largest finite number of the spans that this step brings for it: that number becomes 448.
A page that arrives by several steps (from several sources, or in chunks) would need one scale before all of
it is there; give each such part a place of its own in `values`, and let a page be that part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton.plan.dtypes import item_bytes
from baton.plan.steps import Spans, Unpack
from baton.plan.tokens import Ints
from baton.transport.packing.casts import DTYPES, FP8, FP8_MAX, Cast, cast_into, cast_rows
from baton.transport.packing.moves import Uploads


@dataclass(frozen=True, slots=True)
class Scales:
    """A float32 per page, on the device of the buffers, and the page that each span of a step belongs to.

    An Unpack from fp8 reads `values`; one to fp8 writes those of the pages that it brings, and no others.
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
        """The scale of every page of this step, which is also written down."""
        peak = torch.zeros(len(self._pages), dtype=torch.float32, device=values.device)
        for rows, page in matrices:
            finite = torch.nan_to_num(rows.float(), nan=0.0, posinf=0.0, neginf=0.0)
            peak.scatter_reduce_(0, page, finite.abs().amax(1), "amax")
        # By a tensor: on a GPU torch divides by a plain number through its reciprocal and rounds otherwise.
        scale = peak / torch.full_like(peak, FP8_MAX)
        # A page of zeros, or of numbers whose scale is too small to be one, keeps its elements as they are.
        scale = torch.where(scale > 0, scale, 1.0)
        values.index_copy_(0, self._pages, scale)
        return scale
