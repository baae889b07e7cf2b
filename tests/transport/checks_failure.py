"""What a failure means: it is reported in time, under its right name, and nothing moves behind it."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import numpy as np
from tests.stolen import Watch
from tests.transport.contract import (
    Lie,
    Link,
    World,
    check,
    completions,
    expect_done,
    expect_failed,
    one_span,
    spans_of,
)

from baton.errors import TransportError
from baton.transport import Done, FailedQuiet, FailedUnknown, HostFence, Quiet, Ranges, Unknown

KIB, MIB = 1 << 10, 1 << 20
HANGS_S = 8.0
"""A ticket that has not ended by then, though it should within a second or two, does not end."""


@check(Lie("HidesFailures", subject="shm"), Lie("SaysDone", subject="tcp"))
def killed_target_is_noticed(world: World) -> None:
    """A target killed mid-transfer ends every ticket within a second, and later batches fail too."""
    target = world.remote_target()
    source = world.source.load(16 * MIB, 1)
    link = world.link(target, 16 * MIB)
    expect_done(world.source, [link.send(source, one_span(MIB))])
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(200)]
    time.sleep(0.02)
    target.kill()
    killed = Watch()
    ended = list(completions(world.source, tickets, HANGS_S).values())
    # Copies into shared memory can be through before anybody could hear that its owner is gone.
    while all(isinstance(each, Done) for each in ended) and killed.own_s() < 0.9:
        ended += completions(world.source, [link.send(source, one_span(MIB))], HANGS_S).values()
    assert killed.own_s() < 1.0, f"known after {killed.wall_s():.2f} s"
    assert any(not isinstance(completion, Done) for completion in ended)
    expect_failed(world.source, [link.send(source, one_span(1))], HANGS_S)


@check(Lie("SaysDone", subject="tcp"), Lie("HidesFailures", subject="tcp"))
def stopped_target_fails_at_the_deadline(world: World) -> None:
    """With the target stopped a batch is Done only if it is there, and otherwise fails at its deadline."""
    target = world.remote_target()
    source = world.source.load(64 * MIB, 2)
    link = world.link(target, 64 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    target.signal(signal.SIGSTOP)
    watch = Watch()
    tickets = [link.send(source, one_span(32 * MIB, start, start), deadline_s=1.0) for start in (0, 32 * MIB)]
    submit_s = watch.own_s()
    ended = completions(world.source, tickets, HANGS_S)
    wait_s, own_s = watch.wall_s(), watch.own_s()
    target.signal(signal.SIGCONT)
    assert submit_s < 0.5, "submit waited for a stopped peer"
    buffer = world.source.buffers[source.number]
    for index, ticket in enumerate(tickets):
        part = slice(index * 32 * MIB, (index + 1) * 32 * MIB)
        match ended[ticket]:
            case Done():
                assert np.array_equal(link.content()[part], buffer[part]), "Done, and not there"
            case FailedQuiet() | FailedUnknown():
                assert wait_s > 0.9, f"failed after {wait_s:.2f} s at a deadline of 1 s"
                assert own_s < 2.5, f"failed after {wait_s:.2f} s at a deadline of 1 s"


@check(Lie("CallsUnknownQuiet", subject="tcp"))
def quiet_failure_is_quiet(world: World) -> None:
    """What failed quietly while the target was stopped does not arrive when it goes on."""
    target = world.remote_target()
    source = world.source.load(64 * MIB, 2)
    link = world.link(target, 64 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    target.signal(signal.SIGSTOP)
    time.sleep(0.2)
    part_bytes = 16 * MIB
    tickets = [
        link.send(source, one_span(part_bytes - 1, start + 1, start + 1), deadline_s=0.5)
        for start in range(0, 64 * MIB, part_bytes)
    ]
    ended = completions(world.source, tickets, HANGS_S)
    target.signal(signal.SIGCONT)
    time.sleep(0.5)
    content = link.content()
    for index, ticket in enumerate(tickets):
        if isinstance(ended[ticket], FailedQuiet):
            part = content[index * part_bytes + 1 : (index + 1) * part_bytes]
            assert not part.any(), f"{ended[ticket]}, and bytes of it came later"


@check(Lie("SendsToSuccessor", subject="shm"), Lie("SendsToSuccessor", subject="tcp"))
def successor_gets_nothing_of_its_predecessor(world: World) -> None:
    """A batch queued for a killed target does not land in the one that has its name and addresses now."""
    first = world.restartable_target()
    source = world.source.load(MIB, 3)
    old = world.link(first, MIB)
    expect_done(world.source, [old.send(source, one_span(1))])
    fence = HostFence()
    queued = [old.send(source, one_span(MIB), fence=fence) for _ in range(3)]
    first.kill()
    new = world.link(world.restartable_target(), MIB)
    assert (old.region.number, old.writer.number) == (new.region.number, new.writer.number)
    fence.set()
    expect_failed(world.source, queued, HANGS_S)
    stale = [
        world.source.send(new.peer, source, old.region, one_span(MIB)),
        world.source.send(old.peer, source, new.region, one_span(MIB)),
    ]
    expect_failed(world.source, stale, HANGS_S)
    time.sleep(0.2)
    assert not new.content().any(), "bytes for the dead target landed in its successor"
    expect_done(world.source, [new.send(source, one_span(MIB))])
    assert np.array_equal(new.content(), world.source.buffers[source.number])


@check(Lie("SaysDone"))
def connection_to_nobody_fails(world: World) -> None:
    """What is submitted to a target that is gone, or that revoked the invitation, fails quietly and soon."""
    source = world.source.load(100, 4)
    target = world.target()
    invitation = target.call("invite")
    region = target.call("expose", 100)
    target.call("revoke", invitation.peer)
    peers = [world.source.connect(invitation.description)]
    target.call("close")
    peers.append(world.source.connect(invitation.description))
    tickets = [world.source.send(peer, source, region, one_span(100)) for peer in peers]
    for completion in completions(world.source, tickets, HANGS_S).values():
        assert isinstance(completion, FailedQuiet), completion


@check(Lie("SaysDone"))
def writes_outside_of_a_region_are_refused(world: World) -> None:
    """A span beyond the region, a region that is not registered, and a size that the peer made up."""
    source = world.source.load(MIB, 5)
    target = world.target()
    for forge in ("span", "size", "number"):
        link = world.link(target, MIB)
        match forge:
            case "span":
                raised = False
                try:
                    link.send(source, one_span(2, 0, MIB - 1))
                except TransportError:
                    raised = True
                assert raised, "a span outside of the target was accepted"
                continue
            case "size":
                region, spans = replace(link.region, num_bytes=2 * MIB), one_span(100, 0, MIB - 50)
            case "number":
                region, spans = replace(link.region, number=99), one_span(MIB)
        ticket = world.source.send(link.peer, source, region, spans)
        ended = completions(world.source, [ticket], HANGS_S)[ticket]
        assert isinstance(ended, FailedQuiet | FailedUnknown), f"{forge}: {ended}"
        assert not link.content().any(), f"{forge}: a refused write touched memory"


@check(Lie("GrantsEverything", side="target"))
def writes_outside_of_a_grant_are_refused(world: World) -> None:
    """Only granted bytes change, whatever a batch asks for; the refusal is counted, and ends the peer."""
    if not world.capabilities.can_enforce_grants:
        assert_says_so(world)
        return
    source = world.source.load(MIB, 6)
    target = world.target()
    ranges = Ranges(*(np.array(values, dtype=np.int64) for values in ([0, 1000, 5000], [1000, 500, 10])))
    inside = spans_of([0, 0], [100, 5000], [1400, 10])
    granted = np.zeros(MIB, dtype=bool)
    granted[:1500] = granted[5000:5010] = True
    for stray in (one_span(1, 0, 1500), one_span(12, 0, 4999), one_span(11, 0, 5000), one_span(MIB)):
        link = world.link(target, MIB, is_granted=False)
        target.call("grant", link.writer, link.region.number, ranges)
        expect_done(world.source, [link.send(source, inside)])
        before, num_refused = link.content().copy(), target.call("counters").num_writes_refused
        mixed = spans_of(
            np.zeros(3), np.append(inside.target, stray.target), np.append(inside.length, stray.length)
        )
        changed = world.source.load(MIB, 99)
        expect_failed(world.source, [world.source.send(link.peer, changed, link.region, mixed)], HANGS_S)
        assert np.array_equal(before[~granted], link.content()[~granted]), "a refused write touched memory"
        expect_failed(world.source, [link.send(source, inside)], HANGS_S)
        assert target.call("counters").num_writes_refused == num_refused + 1


def assert_says_so(world: World) -> None:
    assert world.capabilities.can_enforce_grants is False


@check(Lie("GrantsEverything", side="target"))
def taken_back_grants_do_not_count(world: World) -> None:
    """After ungrant the bytes are out of bounds again, and the rest of what was granted is not."""
    if not world.capabilities.can_enforce_grants:
        assert_says_so(world)
        return
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB, is_granted=False)
    low = Ranges(np.array([0]), np.array([1000]))
    high = Ranges(np.array([1000]), np.array([1000]))
    number = link.target.call("grant", link.writer, link.region.number, low)
    link.target.call("grant", link.writer, link.region.number, high)
    expect_done(world.source, [link.send(source, one_span(2000))])
    assert isinstance(link.target.call("ungrant", link.writer, number), Quiet)
    expect_done(world.source, [link.send(source, one_span(1000, 0, 1000))])
    before = link.content().copy()
    expect_failed(world.source, [link.send(source, one_span(1000, 500, 0))], HANGS_S)
    assert np.array_equal(before, link.content())


@check(Lie("SaysUnchecked", side="target"))
def unchecked_peers_need_no_grant(world: World) -> None:
    """Where a peer is said to reach a region by itself, it writes there without a grant; others do not."""
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB, is_granted=False)
    assert not link.target.call("is_unchecked", link.writer, link.region.number), "before it was let in"
    number = link.target.call("grant", link.writer, link.region.number)
    expect_done(world.source, [link.send(source, one_span(1000))])
    link.target.call("ungrant", link.writer, number)
    if link.target.call("is_unchecked", link.writer, link.region.number):
        expect_done(world.source, [link.send(source, one_span(1000, 0, 2000))])
        content = world.source.buffers[source.number]
        assert np.array_equal(link.content()[2000:3000], content[:1000])


@check(Lie("LetsStrangersIn", side="target"))
def strangers_are_refused(world: World) -> None:
    """Somebody with the address and without the secret writes nothing, and is counted."""
    if not world.capabilities.can_refuse_strangers:
        assert world.capabilities.can_refuse_strangers is False
        return
    source = world.source.load(MIB, 8)
    link = world.link(world.target(), MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    invitation = link.target.call("invite")
    link.target.call("grant", invitation.peer, link.region.number)
    stranger = world.source.connect(replace(invitation.description, secret="00" * 16))
    ticket = world.source.send(stranger, source, link.region, one_span(MIB))
    ended = completions(world.source, [ticket], HANGS_S)[ticket]
    assert isinstance(ended, FailedQuiet), ended
    assert not link.content()[1:].any()
    assert link.target.call("counters").num_strangers >= 1


@check(Lie("SaysQuiet", side="target"))
def revoked_peer_is_quiet(world: World) -> None:
    """After Quiet not a byte moves, though the source goes on; Unknown is for those who cannot stop it."""
    source = world.source.load(16 * MIB, 9)
    link = world.link(world.target(), 16 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(50)]
    time.sleep(0.01)
    stillness = link.target.call("revoke", link.writer)
    if isinstance(stillness, Unknown):
        assert not world.capabilities.can_revoke, stillness
        stillness = ask_again(link)
    before = link.content().copy()
    world.source.buffers[source.number][:] = 255 - world.source.buffers[source.number]
    tickets.append(link.send(source, one_span(16 * MIB)))
    ended = completions(world.source, tickets, HANGS_S)
    time.sleep(0.1)
    assert np.array_equal(before, link.content()), f"bytes moved after {stillness}"
    assert not isinstance(ended[tickets[-1]], Done)
    assert isinstance(link.target.call("revoke", link.writer), Quiet)


def ask_again(link: Link) -> Quiet:
    """A living source that hears of its revocation leaves by itself."""
    for _ in range(200):
        if isinstance(stillness := link.target.call("revoke", link.writer), Quiet):
            return stillness
        time.sleep(0.01)
    raise AssertionError("a living source did not leave within 2 s of its revocation")


@check(Lie("SaysQuiet", side="target", subject="shm"))
def revoked_source_that_hangs_or_dies(world: World) -> None:
    """A stopped source is Quiet only if it can be shut out; a dead one is Quiet."""
    target, writer = world.target(), world.remote_source()
    sources = [writer.call("load", 64 * MIB, 10), writer.call("load", 64 * MIB, 11)]
    region = target.call("expose", 64 * MIB)
    invitation = target.call("invite")
    target.call("grant", invitation.peer, region.number)
    peer = writer.call("connect", invitation.description)
    writer.call("send", peer, sources[0], region, one_span(1))
    assert len(writer.call("events", 1, 5.0)) == 1
    for index in range(500):
        writer.call("send", peer, sources[index % 2], region, one_span(64 * MIB))
    writer.signal(signal.SIGSTOP)
    time.sleep(0.05)
    stillness = target.call("revoke", invitation.peer)
    assert isinstance(stillness, Quiet) or not world.capabilities.can_revoke
    if isinstance(stillness, Quiet):
        before = target.call("digest", region.number)
        writer.signal(signal.SIGCONT)
        time.sleep(0.2)
        assert before == target.call("digest", region.number), "bytes moved after Quiet"
    writer.kill()
    assert isinstance(target.call("revoke", invitation.peer), Quiet)
