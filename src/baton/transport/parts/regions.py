"""The regions of one transport and who is using them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from baton.errors import TransportError
from baton.transport.base import Bytes, Region, RemoteRegion
from baton.transport.parts.buffers import Memory


@dataclass(slots=True)
class _Entry:
    region: Region
    memory: Memory
    num_users: int = 0


class Regions:
    """Registered memory by number; it cannot be forgotten while a ticket, a grant or a write uses it."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._num_added = 0

    def add(self, memory: Memory, access: str = "") -> Region:
        """Makes memory known under a new number."""
        if not len(memory.bytes):
            raise TransportError("an empty buffer cannot be registered")
        with self._lock:
            self._num_added += 1
            remote = RemoteRegion(self._incarnation, self._num_added, len(memory.bytes), access)
            region = Region(remote, memory.place)
            self._entries[region.number] = _Entry(region, memory)
        return region

    def remove(self, region: Region) -> None:
        """Forgets a region that nobody uses."""
        with self._lock:
            entry = self._entry(region)
            if entry.num_users:
                raise TransportError(
                    f"region {region.number} is in use ({entry.num_users} tickets, grants or writes); "
                    "let them end or take them back before unregistering it"
                )
            del self._entries[region.number]

    def use(self, region: Region) -> Memory:
        """The memory of a region, which stays registered until `leave`."""
        with self._lock:
            entry = self._entry(region)
            entry.num_users += 1
            return entry.memory

    def use_number(self, number: int) -> Bytes | None:
        """The bytes of the region that a peer names, in use until `leave`; None if there is none."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                return None
            entry.num_users += 1
            return entry.memory.bytes

    def leave(self, number: int) -> None:
        """The opposite of one `use`."""
        with self._lock:
            self._entries[number].num_users -= 1

    def memory(self, number: int) -> Memory | None:
        """The memory of a region by number, to look at."""
        with self._lock:
            entry = self._entries.get(number)
            return entry.memory if entry else None

    def clear(self) -> None:
        """Lets go of everything; nothing may be in use any more."""
        with self._lock:
            self._entries.clear()

    def _entry(self, region: Region) -> _Entry:
        entry = self._entries.get(region.number)
        if entry is None or entry.region != region:
            raise TransportError(f"region {region.number} is not registered with this transport")
        return entry
