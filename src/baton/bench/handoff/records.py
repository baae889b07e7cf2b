"""What rank processes record of a hand-over; times are on the clock that all processes of a host share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from baton.bench.handoff.workload import PrefillStep
from baton.transport import DEADLINE_S, Batch, Completion, Done, Fence, Peer, Ticket, Transport


@dataclass(frozen=True, slots=True)
class CopyTiming:
    """One batch: its target incarnation, and the time from submit to the poll that returned its end."""

    target: str
    submitted_s: float
    ended_s: float
    num_bytes: int
    num_spans: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """One transfer for a rank to run."""

    transfer: str
    slot: int = 0
    start_s: float = 0.0
    salt: int = 0
    is_verified: bool = False
    timeout_s: float = 120.0
    steps: tuple[PrefillStep, ...] = ()
    """At a source: what to send and when."""
    is_sampler: bool = False
    """At a source: whether this rank sends the aux record."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A source rank's part."""

    rank: int
    called_s: float
    layer_ends_s: tuple[float, ...]
    """One for each step of the order."""
    committed_s: float
    settled_s: float
    outcome: str
    copies: tuple[CopyTiming, ...] = ()
    inner_copies: tuple[CopyTiming, ...] = ()
    """Below the throttled link, if there is one."""


@dataclass(frozen=True, slots=True)
class Received:
    """The target's part."""

    rank: int
    called_s: float
    settled_s: float
    outcome: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """One transfer as all ranks saw it."""

    transfer: str
    start_s: float
    steps: dict[int, tuple[PrefillStep, ...]]
    sent: dict[int, Sent]
    received: Received
    target_ranks: dict[str, int] = field(default_factory=dict)
    """Target ranks by the incarnation of their transport."""

    @property
    def is_ready(self) -> bool:
        """Whether the target may decode."""
        return self.received.outcome == "ready"


class RecordingTransport:
    """Wraps a transport and records when each batch was submitted and when it ended."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._open: dict[Ticket, tuple[float, Batch]] = {}
        self._ended: list[CopyTiming] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Submits a batch and records the time."""
        with self._lock:  # its end must not be polled before it is recorded
            submitted_s = monotonic()
            ticket = self._inner.submit(peer, batch, fence, deadline_s)
            self._open[ticket] = (submitted_s, batch)
        return ticket

    def poll(self) -> list[Completion]:
        """Polls, and records the batches that ended."""
        events = self._inner.poll()
        now_s = monotonic()
        with self._lock:
            for event in events:
                self._note(event.ticket, now_s, isinstance(event, Done))
        return events

    def take(self) -> list[CopyTiming]:
        """The batches that ended since the last call, in order of their end."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _note(self, ticket: Ticket, ended_s: float, is_done: bool) -> None:
        submitted_s, batch = self._open.pop(ticket)
        spans, target = batch.spans, batch.target.incarnation
        self._ended.append(CopyTiming(target, submitted_s, ended_s, spans.num_bytes, len(spans), is_done))
