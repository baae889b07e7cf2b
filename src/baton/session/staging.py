"""Leases of byte ranges of one staging buffer, first fit.

A lease that may still be written by somebody is quarantined by not giving it back.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from baton.errors import ConfigError, LocalProtocolError

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Lease:
    """A range of the staging buffer, and the number of this lease, which is never used again."""

    offset: int
    num_bytes: int
    number: int


class Staging:
    """One staging buffer's ranges: leased, or free."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ConfigError(f"staging cannot have {num_bytes} bytes; use 0 for none")
        self.num_bytes = num_bytes
        self._leases: list[Lease] = []
        """Ascending by offset."""
        self._num_made = 0

    @property
    def num_leases(self) -> int:
        """Leases that are out."""
        return len(self._leases)

    @property
    def leased_bytes(self) -> int:
        """Bytes that are out, the rounding of each lease counted."""
        return sum(_stop(lease) - lease.offset for lease in self._leases)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not out; they may lie apart."""
        return max(0, self.num_bytes - self.leased_bytes)

    def lease(self, num_bytes: int) -> Lease | None:
        """The first free range that is long enough, or None; what is longer than the buffer never fits."""
        if num_bytes < 1:
            raise LocalProtocolError(f"a lease of {num_bytes} bytes; who needs none asks for none")
        start = 0
        for place, lease in enumerate([*self._leases, None]):
            stop = self.num_bytes if lease is None else lease.offset
            if start + num_bytes <= stop:
                found = Lease(start, num_bytes, self._num_made)
                self._num_made += 1
                self._leases.insert(place, found)
                return found
            if lease is not None:
                start = _stop(lease)
        return None

    def give_back(self, lease: Lease) -> None:
        """Ends a lease, once."""
        place = bisect_left(self._leases, lease.offset, key=lambda found: found.offset)
        if place == len(self._leases) or self._leases[place] != lease:
            raise LocalProtocolError(f"{lease} is not out; a lease is given back once, where it came from")
        del self._leases[place]

    def check_integrity(self) -> None:
        """Leases are ascending, aligned, apart, inside the buffer, and each was made here."""
        reached = 0
        for lease in self._leases:
            assert lease.offset % ALIGNMENT == 0, f"{lease} is not aligned"
            assert lease.offset >= reached, f"{lease} begins inside the lease before it"
            assert lease.num_bytes >= 1, f"{lease} is of nothing"
            assert 0 <= lease.number < self._num_made, f"{lease} was not made here"
            reached = lease.offset + lease.num_bytes
        assert reached <= self.num_bytes, f"leases reach to {reached} of {self.num_bytes} bytes"
        numbers = {lease.number for lease in self._leases}
        assert len(numbers) == len(self._leases), "two leases with one number"


def _stop(lease: Lease) -> int:
    """Where the next lease may begin."""
    return -(-(lease.offset + lease.num_bytes) // ALIGNMENT) * ALIGNMENT
