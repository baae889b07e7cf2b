"""Packing, unpacking and checksums with torch, on registered memory of one device.

These run on workers. Each call is done with its bytes when it returns. Import it through `memory.tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.errors import TransportError
from baton.plan.chunks import Gathers
from baton.plan.steps import STAGING, Pack, Spans, Unpack
from baton.transport import packing
from baton.transport.base import Bytes

Buffer: TypeAlias = Bytes | Tensor
"""Contiguous memory that was registered with a transport."""


def run_packs(packs: Iterable[Pack], buffers: Mapping[str, Buffer], staging: Buffer) -> None:
    """Gathers a chunk into its place in the source's staging."""
    into = _bytes_of(staging)
    for step in packs:
        packing.pack(step, _bytes_of(buffers[step.buffer]), into)
    _finish(into)


def run_unpacks(unpacks: Iterable[Unpack], staging: Buffer, buffers: Mapping[str, Buffer]) -> None:
    """Scatters a chunk from its place in the target's staging, changing element types on the way."""
    landed = _bytes_of(staging)
    for step in unpacks:
        packing.unpack(step, landed, _bytes_of(buffers[step.buffer]))
    _finish(landed)


def checksums(
    sums: Gathers, buffers: Mapping[str, Buffer], staging: Buffer | None = None
) -> dict[str, bytes]:
    """By component: the xxh3 of a chunk's bytes in canonical order; `staging` is the chunk's place in it."""
    digests: dict[str, bytes] = {}
    for name, (buffer, spans) in sums.items():
        memory = staging if buffer == STAGING else buffers[buffer]
        assert memory is not None, "a chunk that lies in staging is summed there"
        digests[name] = xxhash.xxh3_128_digest(_gathered(spans, _bytes_of(memory)).data)
    return digests


def _gathered(spans: Spans, buffer: Tensor) -> Bytes:
    """The spans' bytes one after another, on the host."""
    if len(spans) == 1:
        start, stop = int(spans.source[0]), int(spans.source[0] + spans.length[0])
        if not 0 <= start <= stop <= len(buffer):
            raise TransportError(f"bytes {start} to {stop} are not in a buffer of {len(buffer)} bytes")
        gathered = buffer[start:stop]
    else:
        gathered = torch.empty(spans.num_bytes, dtype=torch.uint8, device=buffer.device)
        packing.pack(Pack(0, 0, "", "", spans), buffer, gathered)
    return np.asarray(gathered.cpu().numpy(), dtype=np.uint8)


def _bytes_of(buffer: Buffer) -> Tensor:
    """A buffer as a tensor of bytes with one dim, in the same memory."""
    if isinstance(buffer, Tensor):
        if not buffer.is_contiguous():
            raise TransportError(f"only contiguous buffers can be moved; got strides {buffer.stride()}")
        return buffer.view(-1).view(torch.uint8)
    if not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise TransportError("only contiguous buffers that can be written can be moved")
    return torch.from_numpy(buffer.reshape(-1).view(np.uint8))


def _finish(buffer: Tensor) -> None:
    """Waits for what was queued on a device."""
    if buffer.device.type == "cuda":
        torch.cuda.current_stream(buffer.device).synchronize()
