"""What a foreign library has to offer to carry the bytes of a transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.plan.steps import Spans
from baton.transport.parts.buffers import Memory


@dataclass(frozen=True, slots=True)
class Limits:
    """How a batch is cut up for a library."""

    piece_bytes: int
    """The longest span."""
    parcel_bytes: int
    """The most bytes of a parcel, which is what is posted at once and shows progress when it is done."""
    parcel_spans: int
    """The most spans of a parcel."""
    num_parcels: int
    """The most parcels under way."""


class Inlet(Protocol):
    """The library at the target, opened for one peer."""

    def expose(self, number: int, memory: Memory) -> bytes:
        """Lets the peer write a region; the answer is what its outlet has to know."""

    def withdraw(self, number: int) -> None:
        """Refuses writes to a region that begin from now on."""

    def close(self) -> None:
        """Ends the instance; when it returns it writes nothing more."""


class Outlet(Protocol):
    """The library at the source, opened for one target; it is used by one thread."""

    def load(self, number: int, memory: Memory) -> None:
        """Makes a region of the source known, if it is not."""

    def forget(self, number: int) -> None:
        """The opposite of `load`, if it was loaded."""

    def aim(self, number: int, access: bytes) -> object:
        """Makes a region of the target known; it may be written when the answer `is_done`."""

    def post(self, source: int, target: int, spans: Spans) -> object:
        """Begins to write a parcel; it has landed when the answer `is_done`."""

    def is_done(self, token: object) -> bool:
        """Whether what was begun is done, asked until it is; raises TransportError once it failed."""

    def close(self) -> None:
        """Ends the instance, whatever is under way; when it returns no source memory is read any more."""


class Library(Protocol):
    """A library that was found and loaded."""

    @property
    def limits(self) -> Limits:
        """How it wants its batches."""

    @property
    def can_bypass(self) -> bool:
        """Whether a source on the target's kernel may write without the target's instance."""

    def open_inlet(self, name: str) -> Inlet:
        """An instance to be written to; raises TransportError if it cannot be had."""

    def open_outlet(self, name: str) -> Outlet:
        """An instance to write with; raises TransportError if it cannot be had."""
