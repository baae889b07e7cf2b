"""What tcp promises beyond the contract: against peers that break the protocol, and in its verdicts."""

import signal
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.transport.contract import World, completions, expect_done, one_span

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.transport import (
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    HostFence,
    Invitation,
    Ranges,
    Region,
    RevokedQuiet,
    RevokedUnknown,
    Transport,
    open_transport,
)
from baton.transport.common.handshake import CHALLENGE_BYTES, CONNECT_PROBE, WELCOME_BYTES, make_hello
from baton.transport.common.listener import receive_exactly
from baton.transport.tcp.wire import PartHeader, goodbye, landed, read_replies, send_all

MIB = 1 << 20


FORGERS: list["Forger"] = []


class Forger:
    """A peer that was invited and then sends what it likes."""

    def __init__(self, target: Transport, *, num_bytes: int = MIB) -> None:
        self.target = target
        self.socks: list[socket.socket] = []
        FORGERS.append(self)
        self.buffer = target.allocate(num_bytes)
        self.region: Region = target.register(self.buffer)
        self.invitation: Invitation = target.invite()
        target.grant(self.invitation.peer, self.region, ranges([0], [1000]))

    def connect(self, description: Description | None = None, stream: int = 0) -> socket.socket:
        description = description or self.invitation.description
        host, _, port = description.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=60)
        self.socks.append(sock)
        challenge = receive_exactly(sock, CHALLENGE_BYTES)
        sock.sendall(CONNECT_PROBE + make_hello(description, stream, bytes(challenge)))
        self.welcome = receive_exactly(sock, WELCOME_BYTES)
        return sock

    def part(self, start: list[int], length: list[int], **changes: int) -> bytes:
        header = PartHeader(self.region.number, 7, len(start), max(0, sum(length)))
        table = np.stack([np.array(start, dtype="<i8"), np.array(length, dtype="<i8")], axis=1)
        return replace(header, **changes).to_bytes() + table.tobytes()


def ranges(start: list[int], length: list[int]) -> Ranges:
    return Ranges(np.array(start, dtype=np.int64), np.array(length, dtype=np.int64))


def heard(sock: socket.socket) -> list[int | str]:
    """Everything the target sends until it hangs up."""
    raw = bytearray()
    try:
        while more := sock.recv(4096):
            raw += more
    except ConnectionResetError:
        pass
    return list(read_replies(raw))


@pytest.fixture
def target():
    transport = open_transport("tcp")
    yield transport
    while FORGERS:
        for sock in FORGERS.pop().socks:
            sock.close()
    transport.close()


FORGED = {
    "not a part": b"\xff" * 48,
    "past the grant": ([999], [2], {}),
    "past the region": ([MIB], [1], {}),
    "before the region": ([-5], [10], {}),
    "no bytes": ([5], [0], {}),
    "negative": ([500], [-5], {"num_bytes": 5}),
    "overflowing": ([2**63 - 1], [2**62], {}),
    "unknown region": ([0], [10], {"region": 99}),
    "more bytes than ranges": ([0], [10], {"num_bytes": 11}),
    "fewer bytes than ranges": ([0], [10], {"num_bytes": 9}),
}


@pytest.mark.parametrize("forged", FORGED)
def test_forged_part_touches_nothing_and_ends_the_peer(target: Transport, forged: str):
    forger = Forger(target)
    sock, other = forger.connect(), forger.connect(stream=1)
    forgery = FORGED[forged]
    sent = forgery if isinstance(forgery, bytes) else forger.part(forgery[0], forgery[1], **forgery[2])
    sock.sendall(sent + b"\1" * 100)
    words = heard(sock)
    assert len(words) == 1
    assert isinstance(words[0], str)
    assert heard(other) == words
    assert not forger.buffer.any()
    assert isinstance(target.revoke(forger.invitation.peer), RevokedQuiet)


def test_too_many_spans_are_refused_at_once(target: Transport):
    forger = Forger(target)
    sock = forger.connect()
    sock.sendall(replace(PartHeader(1, 1, 1, 1), num_spans=2**32 - 1).to_bytes())
    assert isinstance(heard(sock)[0], str)


def test_a_right_part_by_hand_lands(target: Transport):
    forger = Forger(target)
    sock = forger.connect()
    sock.sendall(forger.part([10, 500], [5, 5]) + b"abcdefghij")
    assert receive_exactly(sock, 16) == landed(7)
    assert forger.buffer[10:15].tobytes() + forger.buffer[500:505].tobytes() == b"abcdefghij"


def test_stream_that_ends_in_a_part_leaves_the_region_free(target: Transport):
    forger = Forger(target)
    sock = forger.connect()
    sock.sendall(forger.part([0], [1000]) + b"\1" * 500)
    sock.close()
    assert isinstance(target.revoke(forger.invitation.peer), RevokedQuiet)
    target.unregister(forger.region)


def test_ungrant_reports_a_write_in_progress(target: Transport):
    forger = Forger(target)
    number = target.grant(forger.invitation.peer, forger.region, ranges([5000], [1000]))
    sock = forger.connect()
    sock.sendall(forger.part([5000], [1000]) + b"\1" * 500)
    limit = time.monotonic() + 60
    while not forger.buffer[5000:5500].all() and time.monotonic() < limit:
        time.sleep(0.01)
    assert isinstance(target.ungrant(forger.invitation.peer, number), RevokedUnknown)
    other = target.grant(forger.invitation.peer, forger.region, ranges([9000], [10]))
    assert isinstance(target.ungrant(forger.invitation.peer, other), RevokedQuiet)
    with pytest.raises(TransportError):
        target.unregister(forger.region)


@pytest.mark.parametrize("change", [{"secret": "00" * 16}, {"incarnation": "0" * 16}, {"peer": 55}])
def test_strangers_get_no_welcome(target: Transport, change: dict):
    forger = Forger(target)
    forger.connect(replace(forger.invitation.description, **change))
    assert forger.welcome is None


def test_a_stream_index_is_good_for_one_connection(target: Transport):
    forger = Forger(target)
    forger.connect(stream=3)
    assert forger.welcome is not None
    forger.connect(stream=3)
    assert forger.welcome is None


def test_a_silent_connection_does_not_keep_others_out(target: Transport):
    forger = Forger(target)
    host, _, port = forger.invitation.description.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    forger.connect()
    assert forger.welcome is not None
    for sock in silent:
        sock.close()


def test_source_does_not_send_to_an_impostor():
    impostor = socket.create_server(("127.0.0.1", 0))
    description = Description("tcp", "ab" * 8, f"127.0.0.1:{impostor.getsockname()[1]}", 1, "11" * 16)
    with World("tcp") as world:
        peer = world.source.connect(description)
        sock, _ = impostor.accept()
        sock.sendall(bytes(CHALLENGE_BYTES))
        assert receive_exactly(sock, 89)
        sock.sendall(bytes(WELCOME_BYTES))
        source = world.source.load(100, 1)
        region = replace(source.remote, incarnation=description.incarnation)
        ticket = world.source.send(peer, source, region, one_span(100))
        ended = completions(world.source, [ticket])[ticket]
        assert isinstance(ended, FailedQuiet)
        assert "did not accept" in ended.cause
    impostor.close()


def test_source_sends_the_connect_probe_first():
    listener = socket.create_server(("127.0.0.1", 0))
    description = Description("tcp", "ab" * 8, f"127.0.0.1:{listener.getsockname()[1]}", 1, "11" * 16)
    with World("tcp") as world:
        world.source.connect(description)
        sock, _ = listener.accept()
        sock.settimeout(60)
        assert sock.recv(100) == CONNECT_PROBE
        sock.close()
    listener.close()


def test_hello_without_a_connect_probe_is_refused(target: Transport):
    forger = Forger(target)
    host, _, port = forger.invitation.description.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        challenge = receive_exactly(sock, CHALLENGE_BYTES)
        sock.sendall(make_hello(forger.invitation.description, 0, bytes(challenge)) + b"x")
        assert receive_exactly(sock, WELCOME_BYTES) is None


def test_revocation_reaches_the_source_as_quiet():
    with World("tcp") as world:
        source = world.source.load(16 * MIB, 1)
        link = world.link(world.target(), 16 * MIB)
        tickets = [link.send(source, one_span(16 * MIB)) for _ in range(30)]
        # However late this thread is, the last are not sent: their fence never comes.
        tickets += [link.send(source, one_span(MIB), fence=HostFence()) for _ in range(2)]
        time.sleep(0.05)
        assert isinstance(link.target.call("revoke", link.writer), RevokedQuiet)
        ended = list(completions(world.source, tickets).values())
        failed = [completion for completion in ended if not isinstance(completion, Done)]
        assert failed
        assert all(isinstance(completion, FailedQuiet) for completion in failed)
        assert all("revoked by the target" in completion.cause for completion in failed)


def test_death_of_the_target_is_unknown_for_what_was_sent_and_quiet_for_what_was_not():
    with World("tcp") as world:
        target = world.remote_target()
        source = world.source.load(64 * MIB, 1)
        link = world.link(target, 64 * MIB)
        expect_done(world.source, [link.send(source, one_span(1))])
        target.signal(signal.SIGSTOP)
        tickets = [link.send(source, one_span(64 * MIB)) for _ in range(3)]
        (connection,) = world.source.transport.connections.values()
        while not any(stream.in_flight for stream in connection.streams):
            time.sleep(0.01)
        target.kill()
        ended = completions(world.source, tickets)
        kinds = [type(ended[ticket]) for ticket in tickets]
        assert kinds[0] is FailedUnknown
        assert kinds[-1] is FailedQuiet


def test_deadline_counts_from_the_last_progress():
    """What waits behind a stuck batch fails at its own deadline, alone; the other goes on with its target."""
    with World("tcp") as world:
        target = world.remote_target()
        source = world.source.load(64 * MIB, 1)
        link = world.link(target, 64 * MIB)
        expect_done(world.source, [link.send(source, one_span(1))])
        target.signal(signal.SIGSTOP)
        time.sleep(0.1)
        long = link.send(source, one_span(64 * MIB), deadline_s=30.0)
        time.sleep(0.2)
        short = link.send(source, one_span(1), deadline_s=0.5)
        ended = completions(world.source, [short])
        assert isinstance(ended[short], FailedQuiet)
        target.signal(signal.SIGCONT)
        expect_done(world.source, [long])


def test_one_stream_and_many():
    for num_streams in (1, 7):
        with World("tcp") as world:
            target = world.target()
            region = target.call("expose", MIB)
            invitation = target.call("invite")
            target.call("grant", invitation.peer, region.number)
            sender = open_transport("tcp", num_streams=num_streams)
            content = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
            world.source.transport.close()
            world.source.transport = sender
            peer = sender.connect(invitation.description)
            ticket = world.source.send(peer, sender.register(content), region, one_span(MIB))
            expect_done(world.source, [ticket])
            assert target.call("read", region.number) == content.tobytes()


def test_replies_survive_any_cut():
    said = landed(5) + landed(2**64 - 1) + goodbye("it is over")
    for size in range(1, len(said)):
        replies, waiting = [], bytearray()
        for start in range(0, len(said), size):
            waiting += said[start : start + size]
            replies += list(read_replies(waiting))
        assert replies == [5, 2**64 - 1, "it is over"]
        assert not waiting


def test_invalid_replies_are_refused():
    with pytest.raises(RemoteProtocolError):
        list(read_replies(bytearray(b"\x09" * 16)))


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"num_streams": 0}, {"num_streams": 1000}, {"host": "0.0.0.0"}]
)
def test_unusable_options_are_refused(options: dict):
    with pytest.raises(ConfigError):
        open_transport("tcp", **options)


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":5", "host:x", "host:99999", "host:-1"])
def test_malformed_addresses_are_refused(address: str):
    transport = open_transport("tcp")
    with pytest.raises(TransportError, match="host:port"):
        transport.connect(Description("tcp", "ab" * 8, address, 1, "11" * 16))
    transport.close()


def test_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        transport = open_transport("tcp", port=taken.getsockname()[1])
        with pytest.raises(TransportError, match="cannot listen"):
            transport.invite()
        transport.close()


def test_all_bytes_are_sent_from_views():
    ours, theirs = socket.socketpair()
    content = np.arange(200_000, dtype=np.uint32).view(np.uint8)
    views = [memoryview(content)[start : start + 777] for start in range(0, len(content), 777)]
    ours.settimeout(60)
    theirs.settimeout(60)

    def send() -> None:
        for start in range(0, len(views), 500):
            send_all(ours, views[start : start + 500])

    thread = threading.Thread(target=send)
    thread.start()
    assert receive_exactly(theirs, len(content)) == content.tobytes()
    thread.join()
    ours.close()
    theirs.close()
