"""Copies between a pinned ring and the memory of a device, on two streams that take turns.

Long spans are copied one by one by the copy engines, all of a slot by one driver call: that takes nothing
from the multiprocessors, which compute, and two processes on one device do not wait for each other. Of short
spans a stream gathers a slotful into staging of its own on the device and copies that in one piece, or the
other way round. While one stream uses the bus, the other gathers or scatters. Nothing blocks: a thread
sleeps in the event that ends a slot's work, and calls back. If the copy engines have few bytes to copy, it
sleeps until the fence and then spins: waking up would take as long as the copy itself.

All that touches CUDA is in `CudaStream` and `CudaDevice`; tests put host tensors in their place.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from baton.errors import TransportError
from baton.plan.steps import Pack, Spans
from baton.plan.tokens import Ints
from baton.transport.base import Bytes
from baton.transport.common.regions import Memory
from baton.transport.common.threads import WorkerThread
from baton.transport.fences import CudaEvent
from baton.transport.packing import prepare
from baton.transport.packing.moves import ELEMENTS, alignment
from baton.transport.shm.ring import TABLE_SPANS, OnCopied, Ring, Slot, SlotCopier, SlotCopy, are_long

log = logging.getLogger(__name__)

NUM_STREAMS = 2
SHORT_BYTES = 16 << 20
"""The bytes of a third of a millisecond on a bus of 50 GB/s."""
DIRECT_SPANS_MAX = 8
"""Up to this many spans are copied one by one: that costs less than a kernel and a second pass."""

_cuda: Any = torch.cuda  # its calls are not typed
_PORTABLE = 1
_ALREADY_REGISTERED = 712
_DRIVER = "libcuda.so.1"
_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1


class StreamCopier:
    """Copies for one device and one ring."""

    def __init__(self, device: CudaDevice, ring: Ring) -> None:
        self._device = device
        self._ring = ring.bytes
        device.pin(ring.bytes)
        self._slots = [torch.from_numpy(slot.bytes) for slot in ring.slots]
        self._streams = [_StagingStream(device, ring) for _ in range(NUM_STREAMS)]
        self._turns = cycle(self._streams)
        self._worker = WorkerThread(f"shm-staged-{device.device}")

    def fill(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        staging = next(self._turns)
        work = partial(staging.fill, copy, slot.index, self._slots[slot.index])
        self._start(staging.stream, work, copy, on_copied)

    def drain(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        staging = next(self._turns)
        work = partial(staging.drain, copy, slot.index, self._slots[slot.index])
        self._start(staging.stream, work, copy, on_copied)

    def close(self) -> None:
        """Completes what it was given, and releases staging and the pinning."""
        self._worker.close()
        self._slots.clear()
        self._streams.clear()
        self._turns = cycle(())
        self._device.unpin(self._ring)
        self._ring = np.zeros(0, dtype=np.uint8)

    def _start(self, stream: CudaStream, work: partial[bool], copy: SlotCopy, on_copied: OnCopied) -> None:
        try:
            stream.enter()
            is_short = work() and copy.spans.num_bytes <= SHORT_BYTES
            event = stream.record(is_blocking=not is_short)
        except RuntimeError as error:  # what torch raises if the device or its memory fails
            self._worker.put(partial(on_copied, f"{self._device.device}: {error}"))
            return
        events = (copy.fence, event) if is_short and copy.fence is not None else (event,)
        self._worker.put(partial(self._complete, events, copy.region, on_copied))

    def _complete(self, events: Sequence[CudaEvent], region: Memory, on_copied: OnCopied) -> None:
        """Waits until a slot is copied; `region` is kept alive until then."""
        try:
            for event in events:
                event.synchronize()
        except RuntimeError as error:
            on_copied(f"{self._device.device}: {error}")
            return
        on_copied("")


class _StagingStream:
    """One stream, with its staging and the indexes of the slots that pass through it."""

    def __init__(self, device: CudaDevice, ring: Ring) -> None:
        self.stream = device.open_stream()
        self._device = device
        self.stream.enter()
        shape = (ring.shape.num_slots, TABLE_SPANS)
        self._staging = torch.empty(ring.shape.slot_bytes, dtype=torch.uint8, device=device.device)
        self._index = torch.empty(shape, dtype=torch.int64, device=device.device)
        # One row per slot: a row is free again when its slot is, so no stream has to be waited for.
        self._index_host = device.pinned(ring.shape.num_slots * TABLE_SPANS).view(shape)

    def fill(self, copy: SlotCopy, index: int, slot: Tensor) -> bool:
        """Copies spans to the slot, or gathers them into staging first; returns whether without kernels."""
        if copy.fence is not None:
            self.stream.wait(copy.fence)
        if are_long(copy.spans) and self.stream.copy(copy.spans, copy.region.address, slot.data_ptr()):
            return True
        with torch.inference_mode():  # pools created in inference mode can be written only in it
            self._gather(copy, index, slot)
        return False

    def drain(self, copy: SlotCopy, index: int, slot: Tensor) -> bool:
        """Copies spans from the slot, or the slot to staging and scatters that; whether without kernels."""
        if are_long(copy.spans) and self.stream.copy(copy.spans, slot.data_ptr(), copy.region.address):
            return True
        with torch.inference_mode():
            self._scatter(copy, index, slot)
        return False

    def _gather(self, copy: SlotCopy, index: int, slot: Tensor) -> None:
        region, spans = self._device.tensor(copy.region), copy.spans
        if len(spans) <= DIRECT_SPANS_MAX:
            _copy_each(spans, region, slot)
            return
        num_bytes, row_bytes = spans.num_bytes, _common_length(spans)
        if row_bytes:
            rows = _StridedRows.of(spans.source, row_bytes, region)
            picked, staged = self._upload(rows.picked, index), rows.staged(self._staging)
            torch.index_select(rows.view(region), 0, picked, out=staged)
        else:
            prepare(_as_step(spans), self._device.device).run(region, self._staging)
        slot[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)

    def _scatter(self, copy: SlotCopy, index: int, slot: Tensor) -> None:
        region, spans = self._device.tensor(copy.region), copy.spans
        if len(spans) <= DIRECT_SPANS_MAX:
            _copy_each(spans, slot, region)
            return
        num_bytes, row_bytes = spans.num_bytes, _common_length(spans)
        self._staging[:num_bytes].copy_(slot[:num_bytes], non_blocking=True)
        if row_bytes:
            rows = _StridedRows.of(spans.target, row_bytes, region)
            picked, staged = self._upload(rows.picked, index), rows.staged(self._staging)
            rows.view(region).index_copy_(0, picked, staged)
        else:
            prepare(_as_step(spans), self._device.device).run(self._staging, region)

    def _upload(self, picked: Ints, index: int) -> Tensor:
        host, on_device = self._index_host[index, : len(picked)], self._index[index, : len(picked)]
        host.numpy()[:] = picked
        return on_device.copy_(host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _StridedRows:
    """Spans of one length as rows of the whole region, at multiples of what divides all of their offsets.

    This is packing's index for the common case, without what costs it a hundred microseconds per slot.
    """

    picked: Ints
    step: int
    row_bytes: int
    width: int

    @staticmethod
    def of(offsets: Ints, row_bytes: int, region: Tensor) -> _StridedRows:
        step = int(np.gcd.reduce(offsets)) or row_bytes
        width = alignment(step, row_bytes, region.data_ptr(), int(region.storage_offset()))
        return _StridedRows(offsets // step, step, row_bytes, width)

    def view(self, region: Tensor) -> Tensor:
        """The region as overlapping rows."""
        count = (len(region) - self.row_bytes) // self.step + 1
        typed = region[: len(region) // self.width * self.width].view(ELEMENTS[self.width])
        shape = (count, self.row_bytes // self.width)
        return typed.as_strided(shape, (self.step // self.width, 1), typed.storage_offset())

    def staged(self, staging: Tensor) -> Tensor:
        """Staging as one row after the other."""
        num_rows = len(self.picked)
        return staging[: num_rows * self.row_bytes].view(ELEMENTS[self.width]).view(num_rows, -1)


def _common_length(spans: Spans) -> int:
    """The length of every span if they are equal, else 0."""
    first = int(spans.length[0])
    return first if bool((spans.length == first).all()) else 0


def _as_step(spans: Spans) -> Pack:
    return Pack(0, 0, "", "", spans)


def _copy_each(spans: Spans, source: Tensor, target: Tensor) -> None:
    triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    for read, write, length in triples:
        target[write : write + length].copy_(source[read : read + length], non_blocking=True)


# What follows runs on a GPU only.


class CudaStream:
    """A new stream, never the default one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device)
        self._copy_batch = find_batch_copy()

    def enter(self) -> None:
        """Makes this the current stream of the calling thread, which is a thread of ours."""
        _cuda.set_stream(self._stream)

    def wait(self, event: Any) -> None:
        """Makes what follows wait for an event."""
        self._stream.wait_event(event)

    def copy(self, spans: Spans, source: int, target: int) -> bool:
        """Has the copy engines copy all spans by one driver call; false, and nothing done, if it cannot."""
        if self._copy_batch is None:
            return False
        error = self._copy_batch(spans, source, target, self._stream.cuda_stream)
        if error:
            # It would refuse the next one too; if the device is lost, the kernels will fail.
            log.warning("the driver cannot copy batches (error %d); copying by kernels from now on", error)
            self._copy_batch = None
        return not error

    def record(self, *, is_blocking: bool) -> CudaEvent:
        """An event after everything so far; waiting for it sleeps if `is_blocking`, else spins."""
        event: CudaEvent = _cuda.Event(blocking=is_blocking)
        self._stream.record_event(event)
        return event


class CudaDevice:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num_pinned = 0

    def tensor(self, memory: Memory) -> Tensor:
        """The bytes of a region."""
        assert isinstance(memory.owner, Tensor), "a region on a device is a tensor"
        if memory.owner.dtype == torch.uint8 and memory.owner.dim() == 1:
            return memory.owner
        return memory.owner.detach().reshape(-1).view(torch.uint8)

    def open_stream(self) -> CudaStream:
        return CudaStream(self.device)

    def pinned(self, num_elements: int) -> Tensor:
        """Integers on the host that can be copied to the device asynchronously."""
        return torch.empty(num_elements, dtype=torch.int64, pin_memory=True)

    def pin(self, buffer: Bytes) -> None:
        """Registers memory with the driver; a second device of this process finds it registered."""
        with _cuda.device(self.device):
            code = int(_cuda.cudart().cudaHostRegister(buffer.ctypes.data, len(buffer), _PORTABLE))
        if code not in (0, _ALREADY_REGISTERED):
            raise TransportError(f"cudaHostRegister of {len(buffer)} bytes failed with error {code}")
        self._num_pinned += code == 0

    def unpin(self, buffer: Bytes) -> None:
        """Unregisters memory, if this device registered it."""
        if self._num_pinned:
            self._num_pinned -= 1
            with _cuda.device(self.device):
                _cuda.cudart().cudaHostUnregister(buffer.ctypes.data)


def open_cuda_copier(memory: Memory, ring: Ring) -> SlotCopier:
    """A copier for regions on the same GPU as this one."""
    assert isinstance(memory.owner, Tensor), "a region on a device is a tensor"
    try:
        return StreamCopier(CudaDevice(memory.owner.device), ring)
    except RuntimeError as error:
        raise TransportError(f"no staging on {memory.owner.device}: {error}") from None


BatchCopy: TypeAlias = Callable[[Spans, int, int, int], int]
"""Takes spans, the addresses of source and target, and the stream; returns the driver's error, 0 for none."""


class _BatchAttributes(ctypes.Structure):
    """How every copy of a batch is to be made."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("places", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


@cache
def find_batch_copy() -> BatchCopy | None:
    """The driver's call that copies many spans at once (CUDA 12.8 and later), or None."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    # Of the two forms the older one also reports which copy failed.
    if (newer := getattr(driver, "cuMemcpyBatchAsync_v2", None)) is not None:
        return _bind_batch_copy(newer, has_failed_index=False)
    if (older := getattr(driver, "cuMemcpyBatchAsync", None)) is not None:
        return _bind_batch_copy(older, has_failed_index=True)
    return None


def _bind_batch_copy(function: Any, *, has_failed_index: bool) -> BatchCopy:
    function.restype = ctypes.c_int
    attributes = _BatchAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)

    def copy(spans: Spans, source: int, target: int, stream: int) -> int:
        rows = np.empty((3, len(spans)), dtype=np.int64)
        np.add(spans.target, target, out=rows[0])
        np.add(spans.source, source, out=rows[1])
        rows[2] = spans.length
        first_row, row_bytes = rows.ctypes.data, rows.strides[0]
        failed = ctypes.c_size_t(0)
        code: int = function(
            *(ctypes.c_void_p(first_row + index * row_bytes) for index in range(3)),
            ctypes.c_size_t(len(spans)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if has_failed_index else ()),
            ctypes.c_void_p(stream),
        )
        return code

    return copy
