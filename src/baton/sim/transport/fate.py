"""What becomes of one batch, drawn when it begins to move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """How a batch ends if nothing else befalls it."""

    DONE = "done"
    ERROR = "error"
    """FailedQuiet: what has not landed does not."""
    PARTIAL = "partial"
    """FailedUnknown, although nothing more lands."""
    LATE = "late"
    """FailedUnknown, and the rest lands later."""
    AGAIN = "again"
    """FailedUnknown, and all of it is written once more, later."""
    HANG = "hang"
    """Nothing more until the deadline, then FailedUnknown, and the rest lands later."""


@dataclass(slots=True)
class Fate:
    """How long a batch takes, in how many pieces it lands, how it ends and how late the rest comes."""

    duration_s: float
    num_pieces: int
    end: End = End.DONE
    share: float = 1.0
    """Of the pieces, those that land before the end, if that is not done."""
    late_s: float = 0.1
