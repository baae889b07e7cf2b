"""What a scheduler tells its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.books.pages import PageCounts
from baton.engine.books.sequence import Sequence
from baton.engine.commands import PageTables


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a prompt is to arrive: page tables, and the tokens by group that are there already."""

    pages: PageTables
    held: dict[str, int]


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened since the caller last asked."""

    started: list[Sequence] = field(default_factory=list)
    """Scheduled for the first time; what a rank has to know goes ahead of the batch."""
    preempted: list[Sequence] = field(default_factory=list)
    """Lost their pages; they begin again by themselves."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sequences by state and pages by use."""

    num_waiting: int
    num_prefilling: int
    num_running: int
    num_receiving: int
    num_sent: int
    num_ended: int
    """Ended, with pages that a batch or a hand-over still has."""
    pages: dict[str, PageCounts]
    num_leased: dict[str, int]
    """Pages by group that a hand-over may touch."""
