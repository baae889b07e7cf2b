"""Faults on purpose, drawn from one seed, all inside the contract.

Theory. Every submitted batch draws one fault, or none, and a strength in [0, 1), two numbers each and in the
order of the calls, so that the same calls meet the same faults whatever the threads do meanwhile.

    delay     begins to move up to delay_s_max late; if that is past its deadline, FailedQuiet then
    error     FailedQuiet, and nothing of it moves
    partial   a part of it moves, then FailedUnknown, and nothing more moves
    hang      a part of it moves, then nothing until the deadline, then FailedUnknown
    late      a part of it moves, then FailedUnknown, and late_s later all of it is written after all

A batch that draws a fault is submitted to the inner transport whole, behind a fence of ours (the gate). So
misuse is raised at once and its region stays in use; giving up is cancelling a batch that waits, which is
quiet by the inner transport's own word; and a late write is the gate opened late, with the bytes that the
source holds then. The part that moves before is a second batch, ahead of it, under a tag that a target behind
this wrapper does not announce; a late write is announced as what it is. What reaches the target crosses the
inner connection, hence `revoke`, `disconnect` and `close` mean for a late write what they mean for any.

FailedQuiet is reported when every inner batch has ended quietly; FailedUnknown at once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np

from baton.errors import ConfigError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Completion,
    Done,
    Event,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Landed,
    Peer,
    Region,
    Ticket,
    Transport,
)
from baton.transport.fences import HostFence
from baton.transport.parts.tickets import CANCELLED
from baton.transport.wrappers.passing import Passing
from baton.transport.wrappers.timing import Time

HIDDEN_TAG = 0xBA70_FA17_BA70_FA17
"""What the part of a batch that moves before a fault is tagged with."""


class Fault(Enum):
    """What befalls a batch."""

    NONE = "none"
    DELAY = "delay"
    ERROR = "error"
    PARTIAL = "partial"
    HANG = "hang"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class FaultyConfig:
    """How often each fault comes, and how strong it is; without options there are none."""

    seed: int = 0
    delay_probability: float = 0.0
    delay_s_max: float = 0.02
    error_probability: float = 0.0
    partial_probability: float = 0.0
    hang_probability: float = 0.0
    late_probability: float = 0.0
    late_s: float = 0.1

    def __post_init__(self) -> None:
        wrong = [fault.value for fault, share in self.probabilities().items() if not 0 <= share <= 1]
        if wrong:
            raise ConfigError(f"a probability is at least 0 and at most 1; {', '.join(wrong)} is not")
        total = sum(self.probabilities().values())
        if total > 1 + 1e-9:
            raise ConfigError(f"the probabilities of all faults add up to at most 1; got {total:.3f}")
        for name in ("delay_s_max", "late_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} has to be 0 or more seconds; got {getattr(self, name)}")

    def probabilities(self) -> dict[Fault, float]:
        """How often each fault comes."""
        return {
            Fault.DELAY: self.delay_probability,
            Fault.ERROR: self.error_probability,
            Fault.PARTIAL: self.partial_probability,
            Fault.HANG: self.hang_probability,
            Fault.LATE: self.late_probability,
        }


class Faults:
    """The faults of a seed, one after the other."""

    def __init__(self, config: FaultyConfig) -> None:
        self._random = random.Random(config.seed)
        self._bounds = list(
            zip(config.probabilities(), itertools.accumulate(config.probabilities().values()), strict=True)
        )

    def draw(self) -> tuple[Fault, float]:
        """The next fault and its strength in [0, 1)."""
        chance, strength = self._random.random(), self._random.random()
        found = (fault for fault, bound in self._bounds if chance < bound)
        return next(found, Fault.NONE), strength


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch and the inner batches that stand for it."""

    ticket: Ticket
    source: Region
    deadline_s: float
    fault: Fault
    strength: float
    gate: HostFence = field(default_factory=HostFence)
    head: Ticket | None = None
    """The inner batch with the part that moves before the fault."""
    parts: set[Ticket] = field(default_factory=set)
    """The inner batches that have not ended."""
    verdict: Completion | None = None
    """What it ends in when its parts have."""
    is_ended: bool = False


class Faulty(Passing):
    """A transport on which batches fail as configured."""

    def __init__(self, inner: Transport, config: FaultyConfig, time: Time | None = None) -> None:
        self.config = config
        self.faults = Faults(config)
        self.flights: dict[Ticket, _Flight] = {}
        self.parts: dict[Ticket, _Flight] = {}
        self._numbers = itertools.count(1)
        super().__init__(inner, time)
        self.listen()

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch and draws its fault."""
        if batch.tag == HIDDEN_TAG:
            raise TransportError(f"tag {HIDDEN_TAG} is taken by the faulty wrapper; use another")
        with self.lock:  # held while submitting, so that no completion is heard before its flight is known
            ticket = Ticket(next(self._numbers))
            flight = _Flight(ticket, batch.source, deadline_s, *self.faults.draw())
            self._launch(flight, peer, batch, fence)
            self.flights[ticket] = flight
        match flight.fault:
            case Fault.DELAY:
                fence.call_when_ready(partial(self._delay, flight))
            case Fault.ERROR:
                fence.call_when_ready(partial(self._refuse, flight, "an error on purpose"))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Gives up what waits or hangs; what was reported as failed stays as it is."""
        with self.lock:
            flight = self.flights.get(ticket)
            if flight is not None:
                self._give_up(flight, FailedQuiet(ticket, CANCELLED))

    def unregister(self, region: Region) -> None:
        """Forgets a region; a late write that would still read it does not come, its ticket having ended."""
        with self.lock:
            for part, flight in list(self.parts.items()):
                if flight.is_ended and flight.source == region:
                    self.inner.cancel(part)
        self.inner.unregister(region)

    def hear(self, event: Event) -> None:
        """Turns what became of inner batches into what becomes of the batch."""
        if isinstance(event, Landed):
            if event.tag != HIDDEN_TAG:
                self.mailbox.put(event)
            return
        flight = self.parts.pop(event.ticket)
        flight.parts.remove(event.ticket)
        if flight.is_ended:
            return
        match event:
            case FailedUnknown(_, cause):
                self._end_unknown(flight, cause)
            case FailedQuiet(_, cause):
                self._give_up(flight, flight.verdict or FailedQuiet(flight.ticket, cause))
            case Done(part) if part != flight.head:
                self._give_up(flight, Done(flight.ticket, self.known_s(event)))
            case Done() if flight.verdict is None:
                self._strike(flight)
            case Done():
                self._end_if_still(flight)

    def end_held(self, peer: Peer | None, cause: str) -> None:
        """Nothing is held back here: every flight ends with its parts."""

    def _launch(self, flight: _Flight, peer: Peer, batch: Batch, fence: Fence) -> None:
        is_gated = flight.fault is not Fault.NONE
        whole = self.inner.submit(peer, batch, flight.gate if is_gated else fence, flight.deadline_s)
        self._add_part(flight, whole)
        if flight.fault not in (Fault.PARTIAL, Fault.HANG, Fault.LATE):
            return
        head = replace(batch, spans=take_head(batch.spans, flight.strength), tag=HIDDEN_TAG)
        try:
            flight.head = self.inner.submit(peer, head, fence, flight.deadline_s)
        except TransportError:  # disconnected or closed since
            flight.is_ended = True
            self.inner.cancel(whole)
            raise
        self._add_part(flight, flight.head)

    def _add_part(self, flight: _Flight, part: Ticket) -> None:
        flight.parts.add(part)
        self.parts[part] = flight

    def _delay(self, flight: _Flight) -> None:
        """The fence is ready: opens the gate later, or never if that is past the deadline."""
        now_s = self.time.now_s()
        delay_s = flight.strength * self.config.delay_s_max
        if delay_s < flight.deadline_s:
            self.time.call_at(now_s + delay_s, flight.gate.set)
        else:
            cause = f"no progress for {flight.deadline_s} s, on purpose"
            self.time.call_at(now_s + flight.deadline_s, partial(self._refuse, flight, cause))

    def _refuse(self, flight: _Flight, cause: str) -> None:
        with self.lock:
            if not flight.is_ended and flight.verdict is None:
                self._give_up(flight, FailedQuiet(flight.ticket, f"{cause} (seed {self.config.seed})"))

    def _strike(self, flight: _Flight) -> None:
        """The part that moves has moved."""
        now_s = self.time.now_s()
        match flight.fault:
            case Fault.PARTIAL:
                self._end_unknown(flight, f"a partial batch on purpose (seed {self.config.seed})")
            case Fault.HANG:
                self.time.call_at(now_s + flight.deadline_s, partial(self._end_hang, flight))
            case Fault.LATE:
                self._end(flight, FailedUnknown(flight.ticket, f"late on purpose (seed {self.config.seed})"))
                self.time.call_at(now_s + self.config.late_s, flight.gate.set)

    def _end_hang(self, flight: _Flight) -> None:
        with self.lock:
            if not flight.is_ended and flight.verdict is None:
                self._end_unknown(flight, f"no progress for {flight.deadline_s} s, on purpose")

    def _give_up(self, flight: _Flight, verdict: Completion) -> None:
        """Cancels the parts that are left; the first that hears of the last one reports the verdict."""
        flight.verdict = verdict
        for part in list(flight.parts):
            self.inner.cancel(part)
        self._end_if_still(flight)

    def _end_if_still(self, flight: _Flight) -> None:
        if not flight.parts and flight.verdict is not None:
            self._end(flight, flight.verdict)

    def _end_unknown(self, flight: _Flight, cause: str) -> None:
        for part in list(flight.parts):
            self.inner.cancel(part)
        self._end(flight, FailedUnknown(flight.ticket, cause))

    def _end(self, flight: _Flight, completion: Completion) -> None:
        flight.is_ended = True
        del self.flights[flight.ticket]
        self.mailbox.put(completion)


def take_head(spans: Spans, share: float) -> Spans:
    """The first bytes of a batch, in the order of its spans; the last span may be cut."""
    num_bytes = int(spans.num_bytes * share)
    ends = np.cumsum(spans.length)
    num_spans = int(np.searchsorted(ends, num_bytes, side="left")) + 1 if num_bytes else 0
    length = spans.length[:num_spans].copy()
    if num_spans:
        length[-1] -= ends[num_spans - 1] - num_bytes
    return Spans(spans.source[:num_spans], spans.target[:num_spans], length)


def faulty(inner: Transport, config: FaultyConfig, time: Time | None = None) -> Transport:
    """A transport with the configured faults."""
    return Faulty(inner, config, time)


CONFIG = FaultyConfig
WRAPPER = faulty
