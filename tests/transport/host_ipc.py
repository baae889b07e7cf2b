"""cuda_ipc over shared memory of the host in place of a device: everything but device.py, without a GPU.

A handle is the path of a memfd in /proc, which opens only while its owner lives, as a CUDA handle does. A
stream is a thread: copies go on while the process that started them does something else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport import Place
from baton.transport.common.regions import Memory
from baton.transport.common.spans import copy_spans
from baton.transport.common.threads import WorkerThread
from baton.transport.cuda_ipc import CudaIpcConfig, CudaIpcTransport
from baton.transport.cuda_ipc.source import ExportedRegion
from baton.transport.shm.ring import Mapping, create_segment, map_segment


class StreamEvent:
    """Set when the stream has passed it."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


class HostStream:
    """Copies on a thread of its own, a moment after they were asked for."""

    delay_s = 0.0005

    def __init__(self, source: Memory) -> None:
        self.source = source
        self.mapped: dict[str, Mapping] = {}
        self.worker = WorkerThread("host-stream")

    def map(self, handle: str) -> int:
        if handle not in self.mapped:
            path, num_bytes = handle.split(":")
            try:
                fd = os.open(path, os.O_RDWR)
            except OSError as error:
                raise TransportError(f"the target's memory cannot be mapped: {error}") from None
            try:
                self.mapped[handle] = map_segment(fd, int(num_bytes), lambda: False)
            finally:
                os.close(fd)
        return self.mapped[handle].address

    def wait(self, event: Any) -> None:
        self.worker.put(event.synchronize)

    def copy(self, spans: Spans, source: int, target: int) -> None:
        self.worker.put(partial(self.run, spans, source, target))

    def run(self, spans: Spans, source: int, target: int) -> None:
        time.sleep(self.delay_s)
        copy_spans(spans, flat(source), flat(target), lambda: False)

    def record(self, *, is_blocking: bool) -> StreamEvent:
        event = StreamEvent()
        self.worker.put(event.passed.set)
        return event

    def close(self) -> None:
        self.worker.close()
        while self.mapped:
            _, mapping = self.mapped.popitem()
            mapped = mapping.map
            del mapping
            mapped.close()


def flat(address: int) -> np.ndarray:
    """All memory from an address on, as a device takes it: nothing checks the bounds."""
    interface = {"data": (address, False), "shape": (1 << 40,), "typestr": "|u1", "version": 3}
    return np.asarray(type("Flat", (), {"__array_interface__": interface})())


class HostMemory:
    """Segments of this process."""

    def __init__(self, open_stream: Callable[[Memory], HostStream] = HostStream) -> None:
        self.open_stream = open_stream
        self.segments: dict[int, tuple[int, Mapping]] = {}
        """By address: descriptor and mapping."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        """The middle of a segment: what is exported is never a whole allocation."""
        fd = create_segment("baton-host-ipc", num_bytes + 2 * 4096)
        mapping = map_segment(fd, num_bytes + 2 * 4096, lambda: False)
        self.segments[mapping.address] = fd, mapping
        return mapping.bytes[4096 : 4096 + num_bytes]

    def export(self, memory: Memory) -> ExportedRegion:
        for address, (fd, mapping) in self.segments.items():
            offset = memory.address - address
            if 0 <= offset < len(mapping.bytes):
                handle = f"/proc/{os.getpid()}/fd/{fd}:{len(mapping.bytes)}"
                return ExportedRegion(handle, offset, len(memory.bytes))
        return ExportedRegion("/nowhere:1", 0, len(memory.bytes))  # memory of a source

    def device_of(self, memory: Memory) -> str:
        return "host"

    def close(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments.clear()


class HostIpc(CudaIpcTransport):
    """cuda_ipc for host memory."""

    capabilities = replace(CudaIpcTransport.capabilities, places=frozenset({Place.HOST}), needs_allocate=True)
    device_memory: HostMemory

    def __init__(self, open_stream: Callable[[Memory], HostStream] = HostStream) -> None:
        self.open_stream = open_stream
        super().__init__(CudaIpcConfig())

    def open_device_memory(self) -> HostMemory:
        return HostMemory(self.open_stream)

    def allocate(self, num_bytes: int) -> np.ndarray:
        return self.device_memory.allocate(num_bytes)

    def stop(self) -> None:
        super().stop()
        self.device_memory.close()
