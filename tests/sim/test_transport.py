"""The simulated transport keeps the parts of the transport contract on which the protocol relies."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.sim.core import Schedule, Strength
from baton.sim.transport import CopyCourse, CopyEnd, Fabric, SimTransport
from baton.transport import (
    NOW,
    Batch,
    Done,
    FailedQuiet,
    FailedUnknown,
    HostFence,
    Ranges,
    RevokedQuiet,
    RevokedUnknown,
)

STRONG = Strength()
WEAK = Strength(can_enforce_grants=False, can_revoke=False)


class CountingObserver:
    def __init__(self) -> None:
        self.num_pieces = 0

    def on_submit(self, copy) -> None: ...

    def on_write(self, copy, target, index, read) -> None:
        self.num_pieces += 1

    def on_end(self, copy, how) -> None: ...


class Pair:
    """A source and a target of 64 bytes each, all of the target granted."""

    def __init__(self, strength: Strength = STRONG, course: CopyCourse | None = None) -> None:
        self.schedule = Schedule()
        self.is_cut = False
        self.fabric = Fabric(self.schedule, random.Random(1), CountingObserver(), lambda *ends: self.is_cut)
        if course is not None:
            self.fabric.faults.append(partial(self._set_course, course))
        self.source, self.target = (
            SimTransport(
                self.fabric, name, strength, instance=name, wake=lambda: None, is_running=lambda: True
            )
            for name in "sd"
        )
        self.given = np.arange(1, 65, dtype=np.uint8)
        self.taken = np.zeros(64, dtype=np.uint8)
        self.read, self.written = self.source.register(self.given), self.target.register(self.taken)
        self.invitation = self.target.invite()
        self.grant = self.target.grant(self.invitation.peer, self.written, Ranges.whole(self.written))
        self.peer = self.source.connect(self.invitation.description)

    @staticmethod
    def _set_course(course: CopyCourse, copy, drawn: CopyCourse) -> None:
        for field in fields(CopyCourse):
            setattr(drawn, field.name, getattr(course, field.name))

    def submit(self, fence=NOW, start: int = 0, deadline_s: float = 1.0):
        at = np.array([start], dtype=np.int64)
        spans = Spans(at, at, np.array([64 - start], dtype=np.int64))
        return self.source.submit(self.peer, Batch(self.read, self.written.remote, spans), fence, deadline_s)

    def run(self, until_s: float = 10.0) -> list[object]:
        while self.schedule.now < until_s and self.schedule.step():
            pass
        return list(self.source.poll())


def test_done_means_that_the_bytes_are_there() -> None:
    pair = Pair(course=CopyCourse(0.01, 7))
    ticket = pair.submit()
    assert not pair.taken.any()
    assert pair.run() == [Done(ticket)]
    assert (pair.taken == pair.given).all()
    assert pair.fabric.num_pending == 0


def test_nothing_is_read_before_the_fence() -> None:
    pair, fence = Pair(), HostFence()
    pair.submit(fence)
    pair.schedule.at(5.0, pair.given.fill, 9)
    pair.schedule.at(5.0, fence.set)
    assert [type(event) for event in pair.run()] == [Done]
    assert (pair.taken == 9).all()


def test_a_quiet_failure_lets_nothing_more_land() -> None:
    pair = Pair(course=CopyCourse(0.01, 8, CopyEnd.ERROR, share=0.5, late_s=1.0))
    pair.submit()
    assert [type(event) for event in pair.run()] == [FailedQuiet]
    assert pair.fabric.num_pending == 0
    assert 0 < np.count_nonzero(pair.taken) < 64


@pytest.mark.parametrize("end", [CopyEnd.LATE, CopyEnd.HANG, CopyEnd.AGAIN])
def test_after_an_unknown_failure_the_rest_lands_with_what_the_source_holds_then(end: CopyEnd) -> None:
    pair = Pair(WEAK, CopyCourse(0.01, 8, end, share=0.5, late_s=0.5))
    pair.submit(deadline_s=0.2)
    while not pair.source.events:
        pair.schedule.step()
    assert [type(event) for event in pair.source.poll()] == [FailedUnknown]
    before = pair.taken.copy()
    pair.given.fill(200)
    pair.run()
    assert (pair.taken == 200).any()
    assert not (before == 200).any()


def test_a_capable_target_stops_what_is_under_way() -> None:
    pair = Pair(Strength(), CopyCourse(0.01, 8, CopyEnd.LATE, share=0.5, late_s=0.5))
    pair.submit()
    while not pair.source.events:
        pair.schedule.step()
    assert pair.target.revoke(pair.invitation.peer) == RevokedQuiet()
    before = pair.taken.copy()
    pair.run()
    assert (pair.taken == before).all()


def test_a_weak_target_is_told_quiet_only_when_the_peer_has_left_and_all_has_drained() -> None:
    pair = Pair(WEAK, CopyCourse(0.01, 8, CopyEnd.LATE, share=0.5, late_s=0.5))
    pair.submit()
    pair.run(0.02)
    assert isinstance(pair.target.ungrant(pair.invitation.peer, pair.grant), RevokedUnknown)
    assert isinstance(pair.target.revoke(pair.invitation.peer), RevokedUnknown)
    pair.run()
    assert (pair.taken == pair.given).all()
    assert pair.target.revoke(pair.invitation.peer) == RevokedQuiet()


def test_a_weak_target_that_cannot_be_heard_is_not_left() -> None:
    pair = Pair(WEAK)
    pair.is_cut = True
    assert isinstance(pair.target.revoke(pair.invitation.peer), RevokedUnknown)
    pair.run(1.0)
    assert isinstance(pair.target.revoke(pair.invitation.peer), RevokedUnknown)
    pair.is_cut = False
    pair.run(2.0)
    assert pair.target.revoke(pair.invitation.peer) == RevokedQuiet()


def test_a_write_outside_of_a_grant_is_refused_where_grants_are_enforced() -> None:
    pair = Pair()
    assert pair.target.ungrant(pair.invitation.peer, pair.grant) == RevokedQuiet()
    pair.submit()
    assert [type(event) for event in pair.run()] == [FailedQuiet]
    assert not pair.taken.any()


@pytest.mark.parametrize("strength", [STRONG, WEAK])
def test_a_region_is_a_peers_own_once_written_where_grants_are_not_enforced(strength: Strength) -> None:
    pair = Pair(strength, CopyCourse(0.001, 2))
    assert not pair.target.is_unchecked(pair.invitation.peer, pair.written)
    pair.submit()
    assert [type(event) for event in pair.run()] == [Done]
    is_free = not strength.can_enforce_grants
    assert pair.target.is_unchecked(pair.invitation.peer, pair.written) == is_free
    pair.target.ungrant(pair.invitation.peer, pair.grant)
    pair.given.fill(9)
    pair.submit()
    assert [type(event) for event in pair.run(20.0)] == [Done if is_free else FailedQuiet]
    assert (pair.taken == 9).all() == is_free


def test_a_region_that_was_never_granted_is_not_handed_out() -> None:
    pair = Pair(WEAK)
    pair.target.ungrant(pair.invitation.peer, pair.grant)
    pair.submit()
    assert [type(event) for event in pair.run()] == [FailedQuiet]
    assert not pair.taken.any()


def test_a_dead_incarnation_gets_nothing_and_its_writer_hears_of_it_within_a_second() -> None:
    pair = Pair(WEAK, CopyCourse(5.0, 8))
    pair.submit(deadline_s=60.0)
    pair.schedule.at(1.0, pair.target.die, True)
    events = pair.run(2.0)
    assert len(events) == 1
    assert not isinstance(events[0], Done)
    landed = pair.taken.copy()
    pair.run(20.0)
    assert (pair.taken == landed).all()


@pytest.mark.parametrize("lingers", [True, False])
def test_copies_of_a_dead_source_land_only_if_they_linger(lingers: bool) -> None:
    pair = Pair(WEAK, CopyCourse(5.0, 8))
    pair.submit(deadline_s=60.0)
    pair.run(0.001)
    pair.source.die(lingers)
    pair.run(20.0)
    assert (pair.taken == pair.given).all() == lingers


def test_a_cut_wire_holds_copies_up_until_their_deadline() -> None:
    pair = Pair(WEAK, CopyCourse(0.01, 4))
    pair.is_cut = True
    pair.submit(deadline_s=0.3)
    assert [type(event) for event in pair.run(1.0)] == [FailedUnknown]
    assert not pair.taken.any()
    pair.is_cut = False
    pair.run(2.0)
    assert (pair.taken == pair.given).all()


def test_what_waits_can_be_called_off_and_misuse_is_told_at_once() -> None:
    pair = Pair()
    ticket = pair.submit(HostFence())
    pair.source.cancel(ticket)
    assert pair.source.poll() == [FailedQuiet(ticket, "cancelled")]
    with pytest.raises(TransportError):
        pair.target.ungrant(pair.invitation.peer, 99)
    pair.source.disconnect(pair.peer)
    with pytest.raises(TransportError):
        pair.submit()
