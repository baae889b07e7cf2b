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
from baton.transport.packing.casts import Cast, cast_rows
from baton.transport.packing.moves import Uploads, equal_rows, make_move


def pack(step: Pack, source: Tensor, staging: Tensor) -> None:
    """Gathers the spans of a source buffer into staging."""
    prepare(step, source.device).run(source, staging)


def unpack(step: Unpack, staging: Tensor, target: Tensor) -> None:
    """Scatters staging into a target buffer, changing the dtype on the way."""
    prepare(step, target.device).run(staging, target)


def prepare(step: Pack | Unpack, device: torch.device) -> Prepared:
    """A step ready to run on a device any number of times."""
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
