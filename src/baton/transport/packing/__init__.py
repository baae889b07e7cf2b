"""Pack and Unpack carried out with torch, on the host or on a GPU.

Buffers are 1-D tensors of bytes: views of registered memory, both on one device. Work goes to the current
stream and the host never waits for it. `prepare` computes once what a step needs besides the buffers; the
result can run many times, over layers whose buffers start elsewhere or over requests with the same pages.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from baton.errors import TransportError
from baton.plan.dtypes import item_bytes
from baton.plan.steps import Pack, Spans, Unpack
from baton.plan.tokens import Ints
from baton.transport.packing.casts import Cast, ScaledCasts, Scales, cast_rows, cut_by_page
from baton.transport.packing.moves import Uploads, equal_rows, make_move

__all__ = [
    "Prepared",
    "PreparedScaled",
    "Scales",
    "cut_by_page",
    "pack",
    "prepare",
    "prepare_scaled",
    "unpack",
]


def pack(step: Pack, source: Tensor, staging: Tensor) -> None:
    """Gathers the spans of a source buffer into staging."""
    prepare(step, source.device).run(source, staging)


def unpack(step: Unpack, staging: Tensor, target: Tensor, scales: Scales | None = None) -> None:
    """Scatters staging into a target buffer, changing the dtype on the way."""
    if scales is None:
        prepare(step, target.device).run(staging, target)
    else:
        prepare_scaled(step, target.device, scales.pages).run(staging, target, scales.values)


def prepare(step: Pack | Unpack, device: torch.device) -> Prepared:
    """A step ready to run on a device any number of times; fp8 is cast without scales."""
    dtypes = step.dtypes if isinstance(step, Unpack) else ("fp8", "fp8")
    uploads = Uploads(device)
    if dtypes[0] == dtypes[1]:
        moves: list[_Part] = [
            make_move(rows.source, rows.target, rows.source_bytes, uploads) for rows in equal_rows(step.spans)
        ]
        return Prepared(moves, _Reach(step.spans, (1, 1)), uploads)
    items = (item_bytes(dtypes[0]), item_bytes(dtypes[1]))
    casts: list[_Part] = [Cast(rows, dtypes, uploads) for rows in cast_rows(step.spans, dtypes, device)]
    return Prepared(casts, _Reach(step.spans, items), uploads)


def prepare_scaled(step: Unpack, device: torch.device, pages: Ints) -> PreparedScaled:
    """An Unpack to or from fp8 with a scale per page; `pages` holds the page of every span."""
    uploads = Uploads(device)
    items = (item_bytes(step.dtypes[0]), item_bytes(step.dtypes[1]))
    return PreparedScaled(ScaledCasts(step, pages, uploads), _Reach(step.spans, items), uploads)


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


class Prepared:
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


class PreparedScaled:
    """An Unpack to or from fp8 under scales, with its index on the device."""

    def __init__(self, casts: ScaledCasts, reach: _Reach, uploads: Uploads) -> None:
        self._casts = casts
        self._reach = reach
        self._uploads = uploads

    def run(self, staging: Tensor, target: Tensor, values: Tensor) -> None:
        """Moves every span, reading the pages' scales (from fp8) or writing them (to fp8)."""
        self._reach.check(staging, target, self._uploads.device)
        assert values.dtype == torch.float32, "a scale is a float32"
        if self._casts.num_pages_min > len(values):
            raise TransportError(
                f"a span is of page {self._casts.num_pages_min - 1}, but there are scales for {len(values)}; "
                "give one for every page"
            )
        with torch.inference_mode():
            self._uploads.order()
            self._casts.run(staging, target, values)
