"""Regions, tickets and connections come and go in any order, and leave nothing behind."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from tests.transport.contract import (
    Lie,
    World,
    check,
    completions,
    expect_done,
    one_span,
)
from tests.transport.ends import Usage

from baton.errors import TransportError
from baton.transport import Done, FailedQuiet, HostFence

KIB, MIB = 1 << 10, 1 << 20


@check(Lie("IgnoresFence"))
def fence_is_waited_for(world: World) -> None:
    """Nothing moves before the fence, and what moves then is what the source holds then."""
    source = world.source.load(MIB, 1)
    buffer = world.source.buffers[source.number]
    link = world.link(world.target(), MIB)
    fence = HostFence()
    ticket = link.send(source, one_span(MIB), fence=fence, deadline_s=0.2)
    ready = link.send(source, one_span(10))
    expect_done(world.source, [ready])
    time.sleep(0.4)
    assert not link.content()[10:].any()
    buffer[:] = 77
    fence.set()
    expect_done(world.source, [ticket])
    assert (link.content() == 77).all()


@check(Lie("ForgetsInUse"))
def regions_change_while_busy(world: World) -> None:
    """Regions come and go beside a busy one, which itself cannot be forgotten."""
    source = world.source.load(16 * MIB, 2)
    link = world.link(world.target(), 16 * MIB)
    fence = HostFence()
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(10)]
    tickets.append(link.send(source, one_span(16 * MIB), fence=fence))
    for _ in range(50):
        world.source.transport.unregister(world.source.transport.register(np.zeros(5000)))
        number = link.target.call("expose", 5000).number
        link.target.call("forget", number)
    with pytest.raises(TransportError):
        world.source.transport.unregister(source)
    with pytest.raises(TransportError):
        link.target.call("forget", link.region.number)
    fence.set()
    expect_done(world.source, tickets)
    assert np.array_equal(link.content(), world.source.buffers[source.number])
    world.source.transport.unregister(source)
    with pytest.raises(TransportError):
        link.send(source, one_span(1))


@check(Lie("WritesAfterCancel"))
def cancelled_tickets_are_quiet(world: World) -> None:
    """A batch cancelled before its fence never moves; one cancelled under way ends once, Done or quiet."""
    source = world.source.load(64 * MIB, 3)
    link = world.link(world.target(), 64 * MIB)
    fence = HostFence()
    ticket = link.send(source, one_span(MIB), fence=fence)
    world.source.transport.cancel(ticket)
    ended = completions(world.source, [ticket])
    assert isinstance(ended[ticket], FailedQuiet)
    fence.set()
    time.sleep(0.4)
    assert not link.content().any()
    moving = [link.send(source, one_span(64 * MIB)) for _ in range(4)]
    for one in moving:
        world.source.transport.cancel(one)
    for completion in completions(world.source, moving).values():
        assert isinstance(completion, Done | FailedQuiet), completion
    before = link.content().copy()
    time.sleep(0.2)
    assert np.array_equal(before, link.content())
    world.source.transport.cancel(ticket)
    assert not world.source.events(1, 0.1)


@check(Lie("ForgetsOnClose"))
def close_ends_every_ticket(world: World) -> None:
    """What waits for a fence, its turn or the wire when the transport closes has a completion."""
    source = world.source.load(32 * MIB, 4)
    link = world.link(world.target(), 32 * MIB)
    tickets = [link.send(source, one_span(32 * MIB)) for _ in range(4)]
    tickets.append(link.send(source, one_span(1), fence=HostFence()))
    world.source.transport.close()
    ended = [event.ticket for event in world.source.transport.poll()]
    assert sorted(ticket.number for ticket in ended) == [ticket.number for ticket in tickets]
    with pytest.raises(TransportError):
        link.send(source, one_span(1))


@check(Lie("HidesFailures"))
def disconnect_ends_its_tickets(world: World) -> None:
    """Tickets of an ended connection end; those of another go on."""
    source = world.source.load(32 * MIB, 5)
    target = world.target()
    ended, other = world.link(target, 32 * MIB), world.link(target, MIB)
    tickets = [ended.send(source, one_span(32 * MIB)) for _ in range(3)]
    tickets.append(ended.send(source, one_span(1), fence=HostFence()))
    kept = other.send(source, one_span(MIB))
    world.source.transport.disconnect(ended.peer)
    assert len(completions(world.source, [*tickets, kept], 5.0)) == 5
    with pytest.raises(TransportError):
        ended.send(source, one_span(1))


@check(Lie("LeaksOnConnect"))
def nothing_is_left_after_200_connections(world: World) -> None:
    """File descriptors and memory are back where they were after 200 connections."""
    source = world.source.load(MIB, 6)
    target = world.target()
    region = target.call("expose", MIB)

    def cycle() -> None:
        invitation = target.call("invite")
        grant = target.call("grant", invitation.peer, region.number)
        peer = world.source.connect(invitation.description)
        expect_done(world.source, [world.source.send(peer, source, region, one_span(MIB))])
        target.call("ungrant", invitation.peer, grant)
        world.source.transport.disconnect(peer)
        revoke_until_quiet(target, invitation.peer)

    for _ in range(20):
        cycle()

    def usages() -> list[Usage]:
        gc.collect()
        return [world.source.usage(), target.call("usage")]

    before = usages()
    for _ in range(200):
        cycle()
    after, limit_s = usages(), time.monotonic() + 5.0
    # The last connections are closed by threads that may not have run yet, before as after.
    while any(new.num_fds > old.num_fds for old, new in zip(before, after, strict=True)):
        assert time.monotonic() < limit_s, f"{after} after {before}"
        time.sleep(0.05)
        after = usages()
    for old, new in zip(before, after, strict=True):
        assert new.rss_bytes - old.rss_bytes < 8 * MIB, f"{new} after {old}"


def revoke_until_quiet(target, peer, timeout_s: float = 10.0) -> None:
    """A source that has left is quiet as soon as the target has heard so."""
    limit = time.monotonic() + timeout_s
    while (stillness := target.call("revoke", peer)).__class__.__name__ != "Quiet":
        assert time.monotonic() < limit, stillness
        time.sleep(0.002)
