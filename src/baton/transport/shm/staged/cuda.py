"""CUDA under the streams of a ring: as little as can be, since nothing of it runs without a GPU."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport.base import Bytes
from baton.transport.parts.buffers import Memory
from baton.transport.shm.staged.batches import find_batch_copy
from baton.transport.shm.staged.movers import Event, Mover
from baton.transport.shm.staged.ring import Ring
from baton.transport.shm.staged.streams import StreamMover

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its calls have no types
_PORTABLE = 1
_ALREADY_REGISTERED = 712


class CudaStream:
    """A stream of its own, never the default one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device)
        self._copy_batch = find_batch_copy()

    def enter(self) -> None:
        """Sends torch's work of this thread here from now on."""
        _cuda.set_stream(self._stream)

    def wait(self, event: Any) -> None:
        """Lets what follows wait for an event."""
        self._stream.wait_event(event)

    def copy(self, spans: Spans, source: int, target: int) -> bool:
        """Has the copy engines take one span after another, all by one call, if the driver can do that."""
        if self._copy_batch is None:
            return False
        error = self._copy_batch(spans, source, target, self._stream.cuda_stream)
        if error:
            # It would refuse the next one too; whether the device is lost, the kernels will show.
            log.warning("the driver copies no batches (error %d): spans go by kernels from now on", error)
            self._copy_batch = None
        return not error

    def record(self, *, is_slept_for: bool) -> Event:
        """An event after what was begun so far."""
        event: Event = _cuda.Event(blocking=is_slept_for)
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
        """A new stream."""
        return CudaStream(self.device)

    def pinned(self, num_elements: int) -> Tensor:
        """Integers that can be copied to the device without waiting."""
        return torch.empty(num_elements, dtype=torch.int64, pin_memory=True)

    def pin(self, buffer: Bytes) -> None:
        """Registers memory with the driver; a second device of this process finds it done."""
        with _cuda.device(self.device):
            code = int(_cuda.cudart().cudaHostRegister(buffer.ctypes.data, len(buffer), _PORTABLE))
        if code not in (0, _ALREADY_REGISTERED):
            raise TransportError(f"cudaHostRegister of {len(buffer)} bytes failed with error {code}")
        self._num_pinned += code == 0

    def unpin(self, buffer: Bytes) -> None:
        """Takes that back, if it was this device that did it."""
        if self._num_pinned:
            self._num_pinned -= 1
            with _cuda.device(self.device):
                _cuda.cudart().cudaHostUnregister(buffer.ctypes.data)


def open_cuda_mover(memory: Memory, ring: Ring) -> Mover:
    """What moves regions of the GPU that this one is on."""
    assert isinstance(memory.owner, Tensor), "a region on a device is a tensor"
    try:
        return StreamMover(CudaDevice(memory.owner.device), ring)
    except RuntimeError as error:
        raise TransportError(f"no staging on {memory.owner.device}: {error}") from None
