"""CUDA memory as cuda_ipc uses it, by calls of the driver: IPC handles, streams and copies.

torch's own way to share a tensor counts its users in a shared file and takes memory back when every receiver
has said so; a receiver that was killed never does. The driver needs nothing of that: a mapping ends with its
process.

Few or long spans are copied by the driver, one call each. A call costs the host 5 to 8 us, in which an H200
copies 10 MiB on the device, so many short spans are copied by one kernel (copy_spans.cu). It reads their
offsets from pinned memory, which saves a copy of the table.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.errors import ConfigError, TransportError
from baton.plan.steps import Spans
from baton.transport.common.regions import Memory
from baton.transport.cuda_ipc.source import PART_SPANS, ExportedRegion
from baton.transport.fences import CudaEvent

DIRECT_SPANS_MAX = 4
DIRECT_BYTES_MIN = 8 << 20
"""Spans of this mean length are copied by the driver, however many they are."""

_cuda: Any = torch.cuda  # its calls are not typed
_DRIVER = "libcuda.so.1"
_KERNEL = "copy_spans"
_BLOCK_THREADS = 256
_BLOCK_BYTES = _BLOCK_THREADS * 64
"""What a block copies at once."""
_NUM_BLOCKS = 1024
"""About as many as an H200 runs at once; each reads its row from the host before it copies."""
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_HERE = secrets.token_hex(8)
"""Names this process in handles: the driver does not open a handle in the process that exported it."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_char * _HANDLE_BYTES),)


class CudaDriver:
    """The driver's library; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_DRIVER)
        except OSError as error:
            raise ConfigError(f"cuda_ipc needs a GPU and its driver ({error}); use shm") from None

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} (error {code})")


class CudaMemory:
    """The GPUs of this process."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("cuda_ipc needs a GPU, and torch sees none; use shm")
        self._driver = CudaDriver()
        self._kernels: dict[torch.device, ctypes.c_void_p] = {}

    def export(self, memory: Memory) -> ExportedRegion:
        """The handle of the allocation that a tensor lies in, and where it lies there."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = _IpcHandle()
        address = ctypes.c_uint64(memory.address)
        try:
            with _current(_tensor(memory).device):
                self._driver.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
                self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except RuntimeError as error:
            raise TransportError(
                f"this memory cannot be shared with another process ({error}); allocate it without "
                "expandable segments (PYTORCH_CUDA_ALLOC_CONF), or use shm"
            ) from None
        offset, num_bytes = memory.address - start.value, len(memory.bytes)
        assert offset + num_bytes <= size.value, "a tensor lies in one allocation"
        return ExportedRegion(f"{_HERE}:{start.value}:{bytes(handle).hex()}", offset, num_bytes)

    def device_of(self, memory: Memory) -> str:
        return str(_tensor(memory).device)

    def open_stream(self, memory: Memory) -> CudaCopyStream:
        device = _tensor(memory).device
        if device not in self._kernels:
            self._kernels[device] = self._load_kernel(device)
        return CudaCopyStream(self._driver, device, self._kernels[device])

    def _load_kernel(self, device: torch.device) -> ctypes.c_void_p:
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        text = Path(__file__).with_name(f"{_KERNEL}.ptx").read_bytes()
        with _current(device):
            self._driver.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text))
            self._driver.call("cuModuleGetFunction", ctypes.byref(kernel), module, _KERNEL.encode())
        return kernel


class CudaCopyStream:
    """A stream that nothing else of this process uses; torch would hand out one of a few that it shares."""

    def __init__(self, driver: CudaDriver, device: torch.device, kernel: ctypes.c_void_p) -> None:
        self._driver = driver
        self._device = device
        self._kernel = kernel
        self._handle = ctypes.c_void_p()
        with _current(device):
            driver.call("cuStreamCreate", ctypes.byref(self._handle), ctypes.c_uint(_NON_BLOCKING))
        self._stream = _cuda.ExternalStream(self._handle.value, device)
        self._mapped: list[int] = []
        self._filled: list[Tensor] = []
        """Tables that no event is behind yet."""
        self._tables: deque[tuple[CudaEvent, Tensor]] = deque()
        """Pinned, oldest first; one can be written again when its event has passed."""

    def map(self, handle: str) -> int:
        process, start, raw = handle.split(":")
        if process == _HERE:
            return int(start)
        address = ctypes.c_uint64()
        ipc_handle = _IpcHandle.from_buffer_copy(bytes.fromhex(raw))
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        try:
            with _current(self._device):
                self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc_handle, flags)
        except RuntimeError as error:
            raise TransportError(
                f"the target's memory cannot be mapped ({error}); both processes have to see both GPUs, and "
                "these to reach each other; otherwise use shm"
            ) from None
        self._mapped.append(address.value)
        return address.value

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def copy(self, spans: Spans, source: int, target: int) -> None:
        num_spans = len(spans)
        if num_spans > DIRECT_SPANS_MAX and spans.num_bytes < DIRECT_BYTES_MIN * num_spans:
            self._launch(spans, source, target)
            return
        triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
        for read, write, length in triples:
            self._driver.call(
                "cuMemcpyAsync",
                ctypes.c_uint64(target + write),
                ctypes.c_uint64(source + read),
                ctypes.c_size_t(length),
                self._handle,
            )

    def record(self, *, is_blocking: bool) -> CudaEvent:
        event: CudaEvent = _cuda.Event(blocking=is_blocking)
        self._stream.record_event(event)
        self._tables.extend((event, table) for table in self._filled)
        self._filled.clear()
        return event

    def close(self) -> None:
        with _current(self._device):
            while self._mapped:
                self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._mapped.pop()))
            self._driver.call("cuStreamDestroy_v2", self._handle)

    def _launch(self, spans: Spans, source: int, target: int) -> None:
        table = self._take_table()
        num_spans = len(spans)
        rows = table.numpy()[:num_spans]
        rows[:, 0], rows[:, 1], rows[:, 2] = spans.source, spans.target, spans.length
        num_parts = -(-int(spans.length.max()) // _BLOCK_BYTES)
        num_parts = max(1, min(num_parts, _NUM_BLOCKS // num_spans))
        numbers = [ctypes.c_uint64(value) for value in (table.data_ptr(), target, source)]
        parameters = (ctypes.c_void_p * len(numbers))(*map(ctypes.addressof, numbers))
        grid, block = (num_spans, num_parts, 1), (_BLOCK_THREADS, 1, 1)
        sizes = [ctypes.c_uint(size) for size in (*grid, *block, 0)]
        self._filled.append(table)
        self._driver.call("cuLaunchKernel", self._kernel, *sizes, self._handle, parameters, None)

    def _take_table(self) -> Tensor:
        if self._tables and self._tables[0][0].query():
            return self._tables.popleft()[1]
        return torch.empty((PART_SPANS, 4), dtype=torch.int64, pin_memory=True)


def _tensor(memory: Memory) -> Tensor:
    assert isinstance(memory.owner, Tensor), "a region on a device is a tensor"
    return memory.owner


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes a device current in this thread, for the driver too."""
    with _cuda.device(device):
        _cuda.current_stream(device).query()
        yield


def _close_device_files() -> None:
    """In a forked child of a process that used CUDA, which cannot use it any more.

    A GPU goes on with what a killed process gave it as long as another process has its device files open, and
    a target takes the end of a source's process for the end of its copies.
    """
    if not _cuda._is_in_bad_fork():
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                os.close(int(name))


os.register_at_fork(after_in_child=_close_device_files)
