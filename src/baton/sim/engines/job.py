"""One transfer as one engine has it, over all ranks of its dp group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.protocol.outcomes import Outcome
from baton.session.handles import Handle
from baton.sim.content import Copybook
from baton.sim.request import Attempt
from baton.transport import NOW, Fence

if TYPE_CHECKING:
    from baton.sim.incarnation import Incarnation


@dataclass(frozen=True, slots=True)
class Wish:
    """How a target asks for a transfer."""

    held: Mapping[str, int] = field(default_factory=dict)
    source_dp: int | None = None
    """The source's group, where the caller names it."""
    source: str = ""
    """The source's name, or its address."""
    is_verified: bool = False
    fence: Fence = NOW
    """The device work of the pages' last owner."""


@dataclass(slots=True, eq=False)
class Job:
    """What both engines keep."""

    attempt: Attempt
    incarnation: Incarnation
    is_source: bool
    ranks: tuple[int, ...]
    books: dict[int, Copybook]
    wish: Wish = field(default_factory=Wish)
    handles: dict[int, Handle] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    """By rank: when the driver was first asked."""
    pages: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """By rank and group: what has not been given back."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    """Ranks whose engine needs the pages no longer."""
    is_aborted: bool = False

    @property
    def transfer(self) -> str:
        """Its id."""
        return self.attempt.transfer

    @property
    def side(self) -> str:
        """Which leg this is."""
        return "source" if self.is_source else "target"

    def described(self) -> str:
        """How it stands, in words."""
        states = {rank: type(handle.state).__name__ for rank, handle in sorted(self.handles.items())}
        left = {rank: sum(map(len, pages.values())) for rank, pages in sorted(self.pages.items())}
        return f"{self.side} states {states}, pages {left}"

    @property
    def is_over(self) -> bool:
        """Whether every rank has an outcome and all pages are back."""
        return len(self.outcomes) == len(self.ranks) and not self.pages
