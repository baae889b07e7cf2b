"""Registered memory, and which bytes of it a peer may write."""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import TransportError
from baton.plan.tokens import Ints
from baton.transport.base import Bytes, Place, Ranges, Region, RemoteRegion
from baton.transport.common.spans import are_inside


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a buffer and where they are; `owner` keeps them alive."""

    bytes: Bytes
    address: int
    place: Place
    owner: object


def memory_of(buffer: Any) -> Memory:
    """A flat view of a contiguous numpy array or torch tensor; the view of device memory must not be read."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise TransportError(f"only contiguous buffers can be registered; got strides {buffer.strides}")
        return Memory(buffer.reshape(-1).view(np.uint8), buffer.ctypes.data, Place.HOST, buffer)
    # Duck typing: torch is an optional dependency and is not imported here.
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


@dataclass(slots=True)
class _Entry:
    region: Region
    memory: Memory
    num_users: int = 0


class Regions:
    """Registered memory by number, with a count of the tickets, grants and writes that use it."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._num_added = 0

    def add(self, memory: Memory, access: str = "") -> Region:
        if not len(memory.bytes):
            raise TransportError("an empty buffer cannot be registered")
        with self._lock:
            self._num_added += 1
            remote = RemoteRegion(self._incarnation, self._num_added, len(memory.bytes), access)
            region = Region(remote, memory.place)
            self._entries[region.number] = _Entry(region, memory)
        return region

    def remove(self, region: Region) -> None:
        """Removes a region; raises while anything uses it."""
        with self._lock:
            entry = self._entry(region)
            if entry.num_users:
                raise TransportError(
                    f"region {region.number} is in use ({entry.num_users} tickets, grants or writes); "
                    "let them end or take them back before unregistering it"
                )
            del self._entries[region.number]

    def acquire(self, region: Region) -> Memory:
        """The memory of a region, which stays registered until `release`."""
        with self._lock:
            entry = self._entry(region)
            entry.num_users += 1
            return entry.memory

    def acquire_number(self, number: int) -> Bytes | None:
        """Like `acquire`, by the number that a peer sent; None if no such region is registered."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                return None
            entry.num_users += 1
            return entry.memory.bytes

    def release(self, number: int) -> None:
        with self._lock:
            self._entries[number].num_users -= 1

    def find(self, number: int) -> Memory | None:
        """The memory of a region, without acquiring it."""
        with self._lock:
            entry = self._entries.get(number)
            return entry.memory if entry else None

    def _entry(self, region: Region) -> _Entry:
        entry = self._entries.get(region.number)
        if entry is None or entry.region != region:
            raise TransportError(f"region {region.number} is not registered with this transport")
        return entry


@dataclass(frozen=True, slots=True)
class RegionGrant:
    """Ranges of one region that a peer may write, or is writing."""

    region: int
    ranges: Ranges


class Grants:
    """The grants of one peer. A write is allowed if the union of the grants covers every byte of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[int, RegionGrant] = {}
        self._merged: dict[int, Ranges] = {}
        self._numbers = itertools.count(1)

    def add(self, region: Region, ranges: Ranges) -> int:
        if len(ranges.start) != len(ranges.length):
            raise TransportError(f"ranges: {len(ranges.start)} starts and {len(ranges.length)} lengths")
        if not are_inside(ranges.start, ranges.length, region.num_bytes):
            raise TransportError(f"a granted range lies outside of region {region.number}")
        with self._lock:
            number = next(self._numbers)
            self._grants[number] = RegionGrant(region.number, ranges)
            self._merged.pop(region.number, None)
        return number

    def remove(self, number: int) -> RegionGrant:
        with self._lock:
            grant = self._grants.pop(number, None)
            if grant is None:
                raise TransportError(f"this peer has no grant {number}; a grant can be taken back once")
            self._merged.pop(grant.region, None)
        return grant

    def remove_all(self) -> list[RegionGrant]:
        with self._lock:
            grants = list(self._grants.values())
            self._grants.clear()
            self._merged.clear()
        return grants

    def has_region(self, region: int) -> bool:
        """Whether any byte of this region is granted."""
        with self._lock:
            return any(grant.region == region for grant in self._grants.values())

    def allow(self, region: int, start: Ints, length: Ints) -> bool:
        """Whether all of these ranges, which are positive and inside the region, are granted."""
        with self._lock:
            merged = self._merged.get(region)
            if merged is None:
                merged = self._merged[region] = self._merge(region)
        if not len(merged.start):
            return not len(start)
        at = merged.start.searchsorted(start, side="right") - 1
        stop = merged.start + merged.length
        return bool((at >= 0).all() and (start + length <= stop[at]).all())

    def _merge(self, region: int) -> Ranges:
        """All grants of a region as ascending ranges that do not touch."""
        granted = [grant.ranges for grant in self._grants.values() if grant.region == region]
        empty = np.zeros(0, dtype=np.int64)
        start = np.concatenate([empty, *(ranges.start for ranges in granted)])
        length = np.concatenate([empty, *(ranges.length for ranges in granted)])
        order = np.argsort(start, kind="stable")
        start, stop = start[order], (start + length)[order]
        if not len(start):
            return Ranges(start, stop)
        reach = np.maximum.accumulate(stop)
        is_first = np.append(True, start[1:] > reach[:-1])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(start)) - 1
        return Ranges(start[first], reach[last] - start[first])


def do_ranges_overlap(left: Ranges, right: Ranges) -> bool:
    order = np.argsort(left.start, kind="stable")
    start = left.start[order]
    reach = np.maximum.accumulate((left.start + left.length)[order])
    before = np.searchsorted(start, right.start + right.length, side="left") - 1
    return bool(((before >= 0) & (reach[before] > right.start)).any())
