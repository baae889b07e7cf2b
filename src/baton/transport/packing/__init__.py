"""Pack and Unpack carried out with torch, on the host or on a GPU.

Buffers are 1-D tensors of bytes: views of registered memory, both on one device. Work goes to the current
stream and the host never waits for it. `prepare` computes once what a step needs besides the buffers; the
result can run many times, over layers whose buffers start elsewhere or over requests with the same pages.

A Cast changes the element type of rows. Every number is converted as baton.plan.dtypes does it, bit for bit:
nearest even, fp8 saturating at 448. A NaN becomes some NaN: torch's own kernels disagree among themselves on
its sign and payload.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.errors import TransportError
from baton.plan.dtypes import item_bytes
from baton.plan.steps import Pack, Spans, Unpack
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


def pack(step: Pack, source: Tensor, staging: Tensor) -> None:
    """Gathers the spans of a source buffer into staging."""
    prepare(step, source.device).run(source, staging)


def unpack(step: Unpack, staging: Tensor, target: Tensor) -> None:
    """Scatters staging into a target buffer, changing the dtype on the way."""
    prepare(step, target.device).run(staging, target)


def prepare(step: Pack | Unpack, device: torch.device) -> PreparedStep:
    """A step ready to run on a device any number of times."""
    dtypes = step.dtypes if isinstance(step, Unpack) else ("fp8", "fp8")
    uploads = Uploads(device)
    if dtypes[0] == dtypes[1]:
        moves: list[_Part] = [
            make_move(rows.source, rows.target, rows.source_bytes, uploads) for rows in equal_rows(step.spans)
        ]
        return PreparedStep(moves, _Reach(step.spans, (1, 1)), uploads)
    items = (item_bytes(dtypes[0]), item_bytes(dtypes[1]))
    casts: list[_Part] = [Cast(rows, dtypes, uploads) for rows in cast_rows(step.spans, dtypes, device)]
    return PreparedStep(casts, _Reach(step.spans, items), uploads)


class _Part(Protocol):
    """Rows of one length."""

    def run(self, source: Tensor, target: Tensor) -> None: ...


class _Reach:
    """How far a step's spans reach at both ends, checked against every pair of buffers."""

    def __init__(self, spans: Spans, items: tuple[int, int]) -> None:
        target_length = spans.length // items[0] * items[1]
        self._source = int((spans.source + spans.length).max(initial=0))
        self._target = int((spans.target + target_length).max(initial=0))
        self._first = int(min(spans.source.min(initial=0), spans.target.min(initial=0)))

    def check(self, source: Tensor, target: Tensor, device: torch.device) -> None:
        """Raises TransportError if a span lies outside of its buffer; a strided view would not notice."""
        for name, buffer, reach in (("source", source, self._source), ("target", target, self._target)):
            assert buffer.dtype == torch.uint8, "buffers are tensors of bytes"
            assert buffer.dim() == 1, "with one dim"
            assert buffer.is_contiguous(), "and no gaps"
            assert buffer.device.type == device.type, f"{buffer.device} is not what was prepared for"
            if self._first < 0 or reach > len(buffer):
                raise TransportError(
                    f"spans reach from byte {self._first} to {reach} of a {name} buffer of {len(buffer)} "
                    "bytes; run a step on the buffers that it was bound to"
                )


class PreparedStep:
    """A Pack or an Unpack with its index on the device."""

    def __init__(self, parts: list[_Part], reach: _Reach, uploads: Uploads) -> None:
        self._parts = parts
        self._reach = reach
        self._uploads = uploads

    def run(self, source: Tensor, target: Tensor) -> None:
        """Moves every span from one buffer to the other, on the current stream."""
        self._reach.check(source, target, self._uploads.device)
        # Pools created in inference mode can be written only in it.
        with torch.inference_mode():
            self._uploads.order()
            for part in self._parts:
                part.run(source, target)
