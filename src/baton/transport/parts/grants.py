"""Which bytes of which regions one peer may write."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import numpy as np

from baton.errors import TransportError
from baton.plan.tokens import Ints
from baton.transport.base import Ranges, Region
from baton.transport.parts.spans import are_inside


@dataclass(frozen=True, slots=True)
class Granted:
    """One grant: ranges of a region."""

    region: int
    ranges: Ranges


class Grants:
    """The grants of one peer; a write is allowed when every byte of it lies in some of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._granted: dict[int, Granted] = {}
        self._merged: dict[int, Ranges] = {}
        self._numbers = itertools.count(1)

    def add(self, region: Region, ranges: Ranges) -> int:
        """Allows these ranges too."""
        if len(ranges.start) != len(ranges.length):
            raise TransportError(f"ranges: {len(ranges.start)} starts and {len(ranges.length)} lengths")
        if not are_inside(ranges.start, ranges.length, region.num_bytes):
            raise TransportError(f"a granted range lies outside of region {region.number}")
        with self._lock:
            number = next(self._numbers)
            self._granted[number] = Granted(region.number, ranges)
            self._merged.pop(region.number, None)
        return number

    def remove(self, number: int) -> Granted:
        """Takes one grant back."""
        with self._lock:
            granted = self._granted.pop(number, None)
            if granted is None:
                raise TransportError(f"grant {number} of this peer is not there; it may be taken back once")
            self._merged.pop(granted.region, None)
        return granted

    def remove_all(self) -> list[Granted]:
        """Takes everything back."""
        with self._lock:
            granted = list(self._granted.values())
            self._granted.clear()
            self._merged.clear()
        return granted

    def mention(self, region: int) -> bool:
        """Whether anything of this region was granted."""
        with self._lock:
            return any(granted.region == region for granted in self._granted.values())

    def allow(self, region: int, start: Ints, length: Ints) -> bool:
        """Whether every one of these ranges, which are positive and inside the region, was granted."""
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
        found = [granted.ranges for granted in self._granted.values() if granted.region == region]
        empty = np.zeros(0, dtype=np.int64)
        start = np.concatenate([empty, *(ranges.start for ranges in found)])
        length = np.concatenate([empty, *(ranges.length for ranges in found)])
        order = np.argsort(start, kind="stable")
        start, stop = start[order], (start + length)[order]
        if not len(start):
            return Ranges(start, stop)
        reach = np.maximum.accumulate(stop)
        is_first = np.append(True, start[1:] > reach[:-1])
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(start)) - 1
        return Ranges(start[first], reach[last] - start[first])


def overlap(one: Ranges, other: Ranges) -> bool:
    """Whether two sets of ranges share a byte."""
    order = np.argsort(one.start, kind="stable")
    start = one.start[order]
    reach = np.maximum.accumulate((one.start + one.length)[order])
    before = np.searchsorted(start, other.start + other.length, side="left") - 1
    return bool(((before >= 0) & (reach[before] > other.start)).any())
