"""The bytes of numpy arrays and torch tensors, without importing torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import TransportError
from baton.transport.base import Bytes, Place


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a buffer and where they are; `owner` keeps them alive."""

    bytes: Bytes
    address: int
    place: Place
    owner: object


def memory_of(buffer: Any) -> Memory:
    """A flat view of a contiguous buffer's bytes; on a device it has their size and may not be read."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise TransportError(f"only contiguous buffers can be registered; got strides {buffer.strides}")
        return Memory(buffer.reshape(-1).view(np.uint8), buffer.ctypes.data, Place.HOST, buffer)
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "is_contiguous"):
        return _memory_of_tensor(buffer)
    raise TransportError(f"a buffer is a numpy array or a torch tensor; got {type(buffer).__name__}")


def _memory_of_tensor(tensor: Any) -> Memory:
    if not tensor.is_contiguous():
        raise TransportError(f"only contiguous buffers can be registered; got strides {tensor.stride()}")
    num_bytes, address = int(tensor.nbytes), int(tensor.data_ptr())
    match tensor.device.type:
        case "cpu":
            place = Place.HOST
        case "cuda":
            place = Place.CUDA
        case other:
            raise TransportError(f"tensors on device type '{other}' cannot be registered; use cpu or cuda")
    if not num_bytes:
        raise TransportError("an empty buffer cannot be registered")
    raw = memoryview((ctypes.c_uint8 * num_bytes).from_address(address))
    return Memory(np.frombuffer(raw, dtype=np.uint8), address, place, tensor)
