"""Wrappers that break their promise, one promise each: what the tests of the wrappers have to catch."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
from tests.transport.lies import Liar

from baton.transport import Done, Event, FailedQuiet, FailedUnknown
from baton.transport.wrappers.faulty import Faulty
from baton.transport.wrappers.throttled import Throttled, ThrottledConfig


class ReportsEarly(Throttled):
    """Lets Done through as it comes."""

    def hear(self, event: Event) -> None:
        self.mailbox.put(event)


class ReportsUnarrived(Throttled):
    """Believes the link, whatever the inner transport says."""

    def submit(self, *how):
        ticket = super().submit(*how)
        with self.lock:
            self.loads[ticket].has_arrived = True
            self._deliver_from(self.loads[ticket].road, self.time.now_s())
            self._set_alarm()
        return ticket

    def hear(self, event: Event) -> None:
        return


class HasNoQueue(Throttled):
    """Gives every batch a link of its own."""

    def _road(self, peer):
        self.roads.clear()
        return super()._road(peer)


class ForgetsLatency(Throttled):
    """Reports a batch when its last byte is on the link."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, ThrottledConfig(config.bytes_per_s), clock)


class CountsFromSubmission(Throttled):
    """Puts a batch on the link before its fence is ready."""

    def submit(self, peer, batch, fence, deadline_s=5.0):
        ticket = super().submit(peer, batch, fence, deadline_s)
        with self.lock:
            load = self.loads[ticket]
            if load.road is None:
                self._enter(load, self.time.now_s())
        return ticket


class IsSlow(Throttled):
    """Has a link with nine tenths of the speed."""

    def __init__(self, inner, config, clock=None):
        super().__init__(inner, ThrottledConfig(config.bytes_per_s * 0.9, config.latency_s), clock)


class TellsLate(Throttled):
    """Says when a batch was done, and lets its caller wait for that word."""

    def poll(self):
        found = super().poll()
        if found:
            time.sleep(0.015)
        return found


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

    def _refuse(self, flight, cause):
        with self.lock:
            self._end(flight, FailedQuiet(flight.ticket, cause))
        self.time.call_at(self.time.now_s() + 0.01, flight.gate.set)


class CallsUnknownQuiet(Faulty):
    """Has no word for what may still arrive."""

    def _end(self, flight, completion):
        match completion:
            case FailedUnknown(ticket, cause):
                completion = FailedQuiet(ticket, cause)
        super()._end(flight, completion)


class EndsTwice(Faulty):
    """Reports a failure a second time."""

    def _end(self, flight, completion):
        super()._end(flight, completion)
        if not isinstance(completion, Done):
            self.mailbox.put(completion)


class SaysDone(Faulty):
    """Calls a partial batch done."""

    def _end_unknown(self, flight, cause):
        self._end(flight, Done(flight.ticket))


class WritesAfterRevoke(Faulty):
    """Makes a late write past the connection, straight into the memory that it once had."""

    memory: np.ndarray

    def _strike(self, flight):
        super()._strike(flight)
        self.time.call_at(self.time.now_s() + self.config.late_s, lambda: self.memory.fill(7))


class HangsForGood(Faulty):
    """Has no deadline."""

    def _end_hang(self, flight):
        return


class Retags(Liar):
    """Sends everything under one tag."""

    def submit(self, peer, batch, fence, deadline_s=5.0):
        return self.inner.submit(peer, replace(batch, tag=5), fence, deadline_s)


class AnnouncesParts(Faulty):
    """Sends the part that moves under the tag of its batch."""

    def __init__(self, inner, config, clock=None):
        super().__init__(Retags(inner), config, clock)
