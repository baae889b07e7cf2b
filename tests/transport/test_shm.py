"""What shm promises beyond the contract: nothing is left of it, and its memory cannot be pulled away."""

import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.faults.stages import named_segments
from tests.transport.contract import World, completions, expect_done, one_span

from baton.transport import (
    Done,
    FailedQuiet,
    Ranges,
    RevokedQuiet,
    open_transport,
)
from baton.transport.common import unix

MIB = 1 << 20


def test_nothing_has_a_name_after_kill():
    with World("shm") as world:
        target = world.remote_target()
        source = world.source.load(MIB, 1)
        link = world.link(target, MIB)
        expect_done(world.source, [link.send(source, one_span(MIB))])
        name = f"baton-shm-{link.peer.incarnation}"
        assert name in Path("/proc/net/unix").read_text()
        named = named_segments(target.pid) | named_segments(os.getpid())
        assert not [entry for entry in named if "baton" in entry]
        target.kill()
        assert name not in Path("/proc/net/unix").read_text()


def test_memory_of_a_dead_target_goes_with_its_last_source():
    with World("shm") as world:
        target = world.remote_target()
        source = world.source.load(1, 1)
        link = world.link(target, 64 * MIB)
        expect_done(world.source, [link.send(source, one_span(1))])
        target.kill()
        world.source.transport.disconnect(link.peer)
        assert link.peer.incarnation not in Path("/proc/self/maps").read_text()


def test_a_source_is_unchecked_where_it_has_mapped():
    with World("shm") as world:
        target, source = world.target(), world.source.load(MIB, 1)
        link, other = world.link(target, MIB), target.call("expose", MIB)
        assert not target.call("is_unchecked", link.writer, link.region.number)
        expect_done(world.source, [link.send(source, one_span(1))])
        assert target.call("is_unchecked", link.writer, link.region.number)
        assert not target.call("is_unchecked", link.writer, other.number)
        ticket = world.source.send(link.peer, source, other, one_span(1))
        assert isinstance(completions(world.source, [ticket])[ticket], FailedQuiet)
        assert not target.call("is_unchecked", link.writer, other.number), "it was refused"


def test_segments_cannot_be_resized():
    transport = open_transport("shm")
    buffer = transport.allocate(5000)
    with pytest.raises(PermissionError):
        os.ftruncate(transport.segments[1].fd, 10)
    buffer[:] = 1
    transport.close()


def test_memory_goes_back_when_it_is_dropped():
    transport = open_transport("shm")
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    region = transport.register(transport.allocate(MIB)[100:200])
    assert len(os.listdir("/proc/self/fd")) > before
    transport.unregister(region)
    assert len(os.listdir("/proc/self/fd")) == before
    transport.close()


def test_target_memory_has_to_be_allocated_here():
    with World("shm") as world:
        target = open_transport("shm")
        region = target.register(np.zeros(100, dtype=np.uint8))
        invitation = target.invite()
        target.grant(invitation.peer, region, Ranges.whole(region))
        peer = world.source.connect(invitation.description)
        source = world.source.load(100, 1)
        ticket = world.source.send(peer, source, region.remote, one_span(100))
        ended = completions(world.source, [ticket])[ticket]
        assert isinstance(ended, FailedQuiet)
        assert "allocate()" in ended.cause
        target.close()


def test_an_invitation_admits_one_source():
    with World("shm") as world:
        link = world.link(world.target(), MIB)
        source = world.source.load(MIB, 1)
        expect_done(world.source, [link.send(source, one_span(1))])
        invitation = link.target.call("invite")
        link.target.call("grant", invitation.peer, link.region.number)
        first, second = (world.source.connect(invitation.description) for _ in range(2))
        tickets = [world.source.send(peer, source, link.region, one_span(1)) for peer in (first, second)]
        kinds = sorted(type(ended).__name__ for ended in completions(world.source, tickets).values())
        assert kinds == ["Done", "FailedQuiet"]


def test_a_writer_that_never_mapped_is_quiet_while_it_lives():
    with World("shm") as world:
        target, writer = world.target(), world.remote_source()
        invitation = target.call("invite")
        writer.call("connect", invitation.description)
        writer.signal(signal.SIGSTOP)
        assert isinstance(target.call("revoke", invitation.peer), RevokedQuiet)


def test_death_is_seen_without_peer_pidfds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)  # as before Linux 6.5
    target = open_transport("shm")
    region = target.register(target.allocate(MIB))
    with World("shm") as world:
        writer = world.remote_source()
        invitation = target.invite()
        target.grant(invitation.peer, region, Ranges.whole(region))
        peer = writer.call("connect", invitation.description)
        source = writer.call("load", MIB, 1)
        ticket = writer.call("send", peer, source, region.remote, one_span(MIB))
        assert writer.call("events", 1, 60.0) == [Done(ticket)]
        writer.signal(signal.SIGSTOP)
        assert not isinstance(target.revoke(invitation.peer), RevokedQuiet)
        writer.kill()
        assert isinstance(target.revoke(invitation.peer), RevokedQuiet)
    target.close()
