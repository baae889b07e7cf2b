"""What rank processes tell of a hand-over; times are of the clock that all processes of a host share."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.bench.handoff.pacing import Step
from baton.bench.handoff.recording import Copied


@dataclass(frozen=True, slots=True)
class Order:
    """One transfer that a rank is to take part in, from a moment on."""

    transfer: str
    slot: int = 0
    start_s: float = 0.0
    salt: int = 0
    is_verified: bool = False
    timeout_s: float = 120.0
    steps: tuple[Step, ...] = ()
    """At a source: what to send when."""
    is_sampler: bool = False
    """At a source: whether this rank gives the aux record."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A source rank's part."""

    rank: int
    called_s: float
    layer_ends_s: tuple[float, ...]
    """By step of the order."""
    committed_s: float
    settled_s: float
    outcome: str
    copies: tuple[Copied, ...] = ()
    inner_copies: tuple[Copied, ...] = ()
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
    steps: dict[int, tuple[Step, ...]]
    sent: dict[int, Sent]
    received: Received
    target_ranks: dict[str, int] = field(default_factory=dict)
    """Target ranks by the incarnation of their transport."""

    @property
    def is_ready(self) -> bool:
        """Whether the target may decode."""
        return self.received.outcome == "ready"
