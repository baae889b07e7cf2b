"""What kinds share: a kind is one file, a frozen dataclass of sizes that yields components."""

from __future__ import annotations

from typing import Protocol

from baton.plan.cache import Component, Extent, Full, Window
from baton.plan.ranges import Ranges


class Kind(Protocol):
    """Sizes of one kind of cache."""

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """The components that this kind keeps on `layers`."""


def reach(window: int) -> tuple[Extent, str]:
    """The extent for a window (0: none), and the suffix that its components carry."""
    return (Window(window), f".w{window}") if window else (Full(), "")
