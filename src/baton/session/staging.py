"""Leases of one staging buffer. Pure bookkeeping: first fit, aligned, neighbours joined again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.plan.tokens import Ints

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Lease:
    """A piece of staging that one chunk or one grant has for itself."""

    offset: int
    num_bytes: int

    def as_range(self) -> tuple[Ints, Ints]:
        """Its start and its length, in the form that transports grant."""
        return np.array([self.offset], dtype=np.int64), np.array([self.num_bytes], dtype=np.int64)


class Staging:
    """A buffer of `num_bytes`, and who has which piece of it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        """Starts and stops, ascending, never touching."""
        self._leased: dict[int, int] = {}
        """Aligned sizes by offset."""

    @property
    def num_leased(self) -> int:
        """Bytes that are leased, alignment included."""
        return sum(self._leased.values())

    def could_hold(self, num_bytes: int) -> bool:
        """Whether a lease of this size is possible at all."""
        return num_bytes <= self.num_bytes

    def lease(self, num_bytes: int) -> Lease | None:
        """The first piece that is large enough; None if there is none now."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for i, (start, stop) in enumerate(self._free):
            taken = min(size, stop - start) if stop == self.num_bytes else size
            if num_bytes <= taken <= stop - start:
                self._free[i : i + 1] = [(start + taken, stop)] if start + taken < stop else []
                self._leased[start] = taken
                return Lease(start, num_bytes)
        return None

    def give_back(self, lease: Lease) -> None:
        """Ends a lease."""
        start, stop = lease.offset, lease.offset + self._leased.pop(lease.offset)
        joined = []
        for piece in self._free:
            if piece[1] == start:
                start = piece[0]
            elif piece[0] == stop:
                stop = piece[1]
            else:
                joined.append(piece)
        self._free = sorted([*joined, (start, stop)])

    def check_integrity(self) -> None:
        """Asserts that every byte is leased once or free once."""
        pieces = sorted([*self._free, *((start, start + size) for start, size in self._leased.items())])
        ends = [0, *(stop for _, stop in pieces)]
        assert ends[:-1] == [start for start, _ in pieces], pieces
        assert ends[-1] == self.num_bytes, pieces
