"""Bookkeeping of one dp group: pages, cached prefixes, sequences and who is computed next; pure."""

from baton.engine.books.limits import SchedulerConfig
from baton.engine.books.reports import Changes, Counts, Reservation
from baton.engine.books.scheduler import Scheduler
from baton.engine.books.sequence import Asked, Role, Sequence, State
from baton.engine.books.shares import Shares

__all__ = [
    "Asked",
    "Changes",
    "Counts",
    "Reservation",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "Shares",
    "State",
]
