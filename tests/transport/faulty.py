"""A transport with injected faults, drawn from one seed, all inside the contract.

Theory. Every submitted batch draws one fault, or none, and a strength in [0, 1), in the order of the calls,
so that the same calls meet the same faults regardless of thread timing.

    delay     starts to move up to delay_s_max late; if that is past its deadline, FailedQuiet then
    error     FailedQuiet, and nothing of it moves
    partial   a part of it moves, then FailedUnknown, and nothing more moves
    hang      a part of it moves, then nothing until the deadline, then FailedUnknown
    late      a part of it moves, then FailedUnknown, and late_s later all of it is written after all

A batch that draws a fault is submitted to the inner transport whole, behind a fence of ours (the gate). So
misuse raises at once and its region stays in use; giving up means cancelling a batch that waits, which the
inner transport reports as quiet; and a late write is the gate opened late, with the bytes that the source
holds then. The part that moves before the fault is a second batch, ahead of it. Everything that reaches the
target crosses the inner connection, so `revoke`, `disconnect` and `close` apply to a late write as to any.

FailedQuiet is reported when every inner batch has ended quietly; FailedUnknown at once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np
from tests.transport.clocks import SystemTimer, TimerClock

from baton.errors import ConfigError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Completion,
    Done,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Peer,
    Region,
    Ticket,
    Transport,
)
from baton.transport.common.tickets import CANCELLED
from baton.transport.fences import HostFence
from baton.transport.throttled import TransportWrapper


class Fault(Enum):
    NONE = "none"
    DELAY = "delay"
    ERROR = "error"
    PARTIAL = "partial"
    HANG = "hang"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class FaultyConfig:
    """How often each fault comes, and how strong it is; by default there are none."""

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
        return next((fault for fault, bound in self._bounds if chance < bound), Fault.NONE), strength


@dataclass(slots=True, eq=False)
class _FaultyBatch:
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
    """How it ends once its parts have."""
    is_ended: bool = False


class Faulty(TransportWrapper):
    """A transport on which batches fail as configured."""

    def __init__(self, inner: Transport, config: FaultyConfig, clock: TimerClock | None = None) -> None:
        self._own_clock = SystemTimer()
        self.timer: TimerClock = clock or self._own_clock
        super().__init__(inner, self.timer)
        self.config = config
        self.faults = Faults(config)
        self.batches: dict[Ticket, _FaultyBatch] = {}
        self.parts: dict[Ticket, _FaultyBatch] = {}
        self._numbers = itertools.count(1)
        self.start()

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        with self.lock:  # held while submitting, so that no completion comes before its batch is known
            ticket = Ticket(next(self._numbers))
            faulty = _FaultyBatch(ticket, batch.source, deadline_s, *self.faults.draw())
            self._launch(faulty, peer, batch, fence)
            self.batches[ticket] = faulty
        match faulty.fault:
            case Fault.DELAY:
                fence.call_when_ready(partial(self._delay, faulty))
            case Fault.ERROR:
                fence.call_when_ready(partial(self._refuse, faulty, "an error on purpose"))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Gives up what waits or hangs; what was reported as failed stays as it is."""
        with self.lock:
            batch = self.batches.get(ticket)
            if batch is not None:
                self._give_up(batch, FailedQuiet(ticket, CANCELLED))

    def unregister(self, region: Region) -> None:
        """Also drops late writes that would still read the region, since their tickets have ended."""
        with self.lock:
            for part, batch in list(self.parts.items()):
                if batch.is_ended and batch.source == region:
                    self.inner.cancel(part)
        self.inner.unregister(region)

    def close(self) -> None:
        self._own_clock.close()
        super().close()

    def on_event(self, event: Completion) -> None:
        """Turns the completions of inner batches into the completion of the batch."""
        batch = self.parts.pop(event.ticket)
        batch.parts.remove(event.ticket)
        if batch.is_ended:
            return
        match event:
            case FailedUnknown(_, cause):
                self._end_unknown(batch, cause)
            case FailedQuiet(_, cause):
                self._give_up(batch, batch.verdict or FailedQuiet(batch.ticket, cause))
            case Done(part) if part != batch.head:
                self._give_up(batch, Done(batch.ticket, self.done_s(event)))
            case Done() if batch.verdict is None:
                self._strike(batch)
            case Done():
                self._end_if_quiet(batch)

    def end_held(self, peer: Peer | None, cause: str) -> None:
        """Nothing is held back here: every batch ends with its parts."""

    def _launch(self, faulty: _FaultyBatch, peer: Peer, batch: Batch, fence: Fence) -> None:
        is_gated = faulty.fault is not Fault.NONE
        whole = self.inner.submit(peer, batch, faulty.gate if is_gated else fence, faulty.deadline_s)
        self._add_part(faulty, whole)
        if faulty.fault not in (Fault.PARTIAL, Fault.HANG, Fault.LATE):
            return
        head = replace(batch, spans=take_head(batch.spans, faulty.strength))
        try:
            faulty.head = self.inner.submit(peer, head, fence, faulty.deadline_s)
        except TransportError:  # disconnected or closed since
            faulty.is_ended = True
            self.inner.cancel(whole)
            raise
        self._add_part(faulty, faulty.head)

    def _add_part(self, batch: _FaultyBatch, part: Ticket) -> None:
        batch.parts.add(part)
        self.parts[part] = batch

    def _delay(self, batch: _FaultyBatch) -> None:
        """The fence is ready: opens the gate later, or never if that is past the deadline."""
        now_s = self.timer.now_s()
        delay_s = batch.strength * self.config.delay_s_max
        if delay_s < batch.deadline_s:
            self.timer.call_at(now_s + delay_s, batch.gate.set)
        else:
            cause = f"no progress for {batch.deadline_s} s, on purpose"
            self.timer.call_at(now_s + batch.deadline_s, partial(self._refuse, batch, cause))

    def _refuse(self, batch: _FaultyBatch, cause: str) -> None:
        with self.lock:
            if not batch.is_ended and batch.verdict is None:
                self._give_up(batch, FailedQuiet(batch.ticket, f"{cause} (seed {self.config.seed})"))

    def _strike(self, batch: _FaultyBatch) -> None:
        """The part that moves before the fault has moved."""
        now_s = self.timer.now_s()
        match batch.fault:
            case Fault.PARTIAL:
                self._end_unknown(batch, f"a partial batch on purpose (seed {self.config.seed})")
            case Fault.HANG:
                self.timer.call_at(now_s + batch.deadline_s, partial(self._end_hang, batch))
            case Fault.LATE:
                self._end(batch, FailedUnknown(batch.ticket, f"late on purpose (seed {self.config.seed})"))
                self.timer.call_at(now_s + self.config.late_s, batch.gate.set)

    def _end_hang(self, batch: _FaultyBatch) -> None:
        with self.lock:
            if not batch.is_ended and batch.verdict is None:
                self._end_unknown(batch, f"no progress for {batch.deadline_s} s, on purpose")

    def _give_up(self, batch: _FaultyBatch, verdict: Completion) -> None:
        """Cancels the parts that are left; when the last one has ended, the verdict is reported."""
        batch.verdict = verdict
        for part in list(batch.parts):
            self.inner.cancel(part)
        self._end_if_quiet(batch)

    def _end_if_quiet(self, batch: _FaultyBatch) -> None:
        if not batch.parts and batch.verdict is not None:
            self._end(batch, batch.verdict)

    def _end_unknown(self, batch: _FaultyBatch, cause: str) -> None:
        for part in list(batch.parts):
            self.inner.cancel(part)
        self._end(batch, FailedUnknown(batch.ticket, cause))

    def _end(self, batch: _FaultyBatch, completion: Completion) -> None:
        batch.is_ended = True
        del self.batches[batch.ticket]
        self.events.put(completion)


def take_head(spans: Spans, share: float) -> Spans:
    """The first bytes of a batch, in the order of its spans; the last span may be cut."""
    num_bytes = int(spans.num_bytes * share)
    ends = np.cumsum(spans.length)
    num_spans = int(np.searchsorted(ends, num_bytes, side="left")) + 1 if num_bytes else 0
    length = spans.length[:num_spans].copy()
    if num_spans:
        length[-1] -= ends[num_spans - 1] - num_bytes
    return Spans(spans.source[:num_spans], spans.target[:num_spans], length)
