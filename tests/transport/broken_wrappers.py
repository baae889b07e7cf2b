"""Wrappers that break one promise each, which the tests of the wrappers have to catch."""

from __future__ import annotations

import math
import random

import numpy as np
from tests.transport.faulty import Faulty

from baton.transport import Completion, Done, FailedQuiet, FailedUnknown
from baton.transport.throttled import LinkSchedule, Throttled, ThrottledConfig


class ReportsEarly(Throttled):
    """Lets Done through as it comes."""

    def on_event(self, event: Completion) -> None:
        self.events.put(event)


class ReportsUnarrived(Throttled):
    """Believes the link, whatever the inner transport says."""

    def submit(self, *how):
        ticket = super().submit(*how)
        with self.lock:
            self.batches[ticket].has_arrived = True
            self._deliver(self.clock.now_s())
        return ticket

    def on_event(self, event: Completion) -> None:
        return


class _IdleLink(LinkSchedule):
    def _time_across(self, item, free_s):
        return super()._time_across(item, -math.inf)


class HasNoQueue(Throttled):
    """Takes the link for idle whenever a batch comes."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, config, clock)
        self.link = _IdleLink(config.bytes_per_s, config.latency_s)


class ForgetsLatency(Throttled):
    """Reports a batch when its last byte is on the link."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, ThrottledConfig(config.bytes_per_s), clock)


class CountsFromSubmission(Throttled):
    """Puts a batch on the link before its fence is ready."""

    def submit(self, peer, batch, fence, deadline_s=5.0):
        ticket = super().submit(peer, batch, fence, deadline_s)
        with self.lock:
            batch = self.batches[ticket]
            if not batch.is_on_link:
                self.link.put(batch, self.clock.now_s())
        return ticket


class IsSlow(Throttled):
    """Has a link with nine tenths of the speed."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, ThrottledConfig(config.bytes_per_s * 0.9, config.latency_s), clock)


class KeepsCancelled(Throttled):
    """Leaves a cancelled batch on the link."""

    def cancel(self, ticket):
        self.inner.cancel(ticket)


class ForgetsItsSeed(Faulty):
    """Draws from another generator each time."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, config, clock)
        self.faults._random = random.Random()


class WritesAfterError(Faulty):
    """Says FailedQuiet, and writes later."""

    def _refuse(self, batch, cause):
        with self.lock:
            self._end(batch, FailedQuiet(batch.ticket, cause))
        self.timer.call_at(self.clock.now_s() + 0.01, batch.gate.set)


class CallsUnknownQuiet(Faulty):
    """Has no word for what may still arrive."""

    def _end(self, batch, completion):
        match completion:
            case FailedUnknown(ticket, cause):
                completion = FailedQuiet(ticket, cause)
        super()._end(batch, completion)


class EndsTwice(Faulty):
    """Reports a failure a second time."""

    def _end(self, batch, completion):
        super()._end(batch, completion)
        if not isinstance(completion, Done):
            self.events.put(completion)


class SaysDone(Faulty):
    """Calls a partial batch done."""

    def _end_unknown(self, batch, cause):
        self._end(batch, Done(batch.ticket))


class WritesAfterRevoke(Faulty):
    """Makes a late write past the connection, straight into the memory that it once had."""

    memory: np.ndarray

    def _strike(self, batch):
        super()._strike(batch)
        self.timer.call_at(self.clock.now_s() + self.config.late_s, lambda: self.memory.fill(7))


class HangsForGood(Faulty):
    """Has no deadline."""

    def _end_hang(self, batch):
        return
