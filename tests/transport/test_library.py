"""What Baton adds to an external library, with a fake library that the test controls."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tests.transport.contract import completions, one_span, spans_of
from tests.transport.ends import End

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport import (
    Capabilities,
    Done,
    FailedQuiet,
    FailedUnknown,
    Invitation,
    Peer,
    Place,
    Reach,
    Region,
    RemoteRegion,
    RevokedQuiet,
    RevokedUnknown,
    Ticket,
)
from baton.transport.common.handshake import CHALLENGE_BYTES, CONNECT_PROBE, WELCOME_BYTES, make_hello
from baton.transport.common.regions import Memory
from baton.transport.common.spans import copy_spans
from baton.transport.library import LibraryTransport
from baton.transport.library.base import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Limits,
    encode_frame,
    import_native,
    is_this_kernel,
    this_kernel,
)

POST_BYTES = 100
SIZE = 1000
LIMITS = Limits(POST_BYTES, POST_BYTES, 10, 3)


@dataclass
class Fake:
    """A library in one process whose transfers end when the test says so."""

    limits: Limits = LIMITS
    can_bypass: bool = False
    exposed: dict[bytes, Memory] = field(default_factory=dict)
    posted: list[Post] = field(default_factory=list)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10_000))
    is_reachable: bool = True
    log: list[str] = field(default_factory=list)

    def open_receiver(self, name: str) -> FakeReceiver:
        return FakeReceiver(self)

    def open_sender(self, name: str) -> FakeSender:
        return FakeSender(self)

    def hold(self) -> None:
        """Lets no transfer end from now on."""
        self.gate = threading.Semaphore(0)


@dataclass
class FakeReceiver:
    library: Fake

    def expose(self, number: int, memory: Memory) -> bytes:
        self.library.exposed[str(number).encode()] = memory
        return str(number).encode()

    def withdraw(self, number: int) -> None:
        del self.library.exposed[str(number).encode()]

    def close(self) -> None:
        self.library.log.append("receiver closed")
        self.library.exposed.clear()


@dataclass
class Post:
    source: np.ndarray
    spans: Spans
    is_over: bool = False


@dataclass
class FakeSender:
    library: Fake
    sources: dict[int, Memory] = field(default_factory=dict)
    targets: dict[int, bytes] = field(default_factory=dict)

    def register(self, number: int, memory: Memory) -> None:
        self.sources[number] = memory

    def unregister(self, number: int) -> None:
        self.sources.pop(number, None)

    def open_region(self, number: int, access: bytes) -> None:
        self.targets[number] = access

    def post(self, source: int, target: int, spans: Spans) -> Post:
        self.library.posted.append(Post(self.sources[source].bytes, spans))
        return self.library.posted[-1]

    def is_done(self, token: object) -> bool:
        if not isinstance(token, Post):
            return self.library.is_reachable
        if not self.library.gate.acquire(blocking=False):
            return False
        target = next(iter(self.library.exposed.values()), None)
        if target is None:
            raise TransportError("the library says no")
        return copy_spans(token.spans, token.source, target.bytes, lambda: False)

    def close(self) -> None:
        self.library.log.append("sender closed")


class FakeTransport(LibraryTransport):
    name = "fake"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        can_refuse_strangers=False,
        can_enforce_grants=False,
        can_revoke=True,
        needs_allocate=False,
    )


@dataclass
class Scene:
    """A source and a target over one fake."""

    library: Fake
    source: End
    target: End
    region: RemoteRegion
    held: Region
    writer: Invitation
    peer: Peer

    def send(self, spans: Spans | None = None, **how: object) -> Ticket:
        return self.source.send(self.peer, self.held, self.region, spans or one_span(SIZE), **how)

    def ending(self, ticket: Ticket, timeout_s: float = 60.0) -> object:
        return completions(self.source, [ticket], timeout_s)[ticket]

    def content(self) -> np.ndarray:
        return self.target.buffers[self.region.number]


@pytest.fixture
def scene() -> Iterator[Scene]:
    library = Fake()
    source = End(FakeTransport(library, "127.0.0.1", 0))
    target = End(FakeTransport(library, "127.0.0.1", 0))
    region, writer = target.expose(SIZE), target.invite()
    target.grant(writer.peer, region.number)
    held = source.load(SIZE, 1)
    peer = source.connect(writer.description)
    yield Scene(library, source, target, region, held, writer, peer)
    source.close()
    target.close()


def wait_until(is_so: object, timeout_s: float = 60.0) -> None:
    limit = time.monotonic() + timeout_s
    assert callable(is_so)
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(1e-3)


def test_source_sends_the_connect_probe_first(scene: Scene):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        scene.source.connect(replace(scene.writer.description, address=address))
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(10)
            assert sock.recv(100) == CONNECT_PROBE


def test_batch_is_split_into_posts_of_which_few_are_in_flight(scene: Scene):
    scene.library.hold()
    ticket = scene.send()
    wait_until(lambda: len(scene.library.posted) == 3)
    time.sleep(0.05)
    assert len(scene.library.posted) == 3
    scene.library.gate.release(100)
    assert isinstance(scene.ending(ticket), Done)
    assert len(scene.library.posted) == SIZE // POST_BYTES
    assert np.array_equal(scene.content(), scene.source.buffers[scene.held.number])


def test_deadline_counts_from_progress(scene: Scene):
    scene.library.hold()
    ticket = scene.send(deadline_s=3.0)
    for _ in range(SIZE // POST_BYTES):
        time.sleep(0.4)
        scene.library.gate.release()
    assert isinstance(scene.ending(ticket), Done)


def test_no_progress_until_the_deadline_is_failed_unknown(scene: Scene):
    scene.library.hold()
    started_s = time.monotonic()
    moving, waiting = scene.send(deadline_s=0.3), scene.send(deadline_s=0.3)
    ended = completions(scene.source, [moving, waiting])
    assert time.monotonic() - started_s > 0.25
    assert isinstance(ended[moving], FailedUnknown)
    assert isinstance(ended[waiting], FailedQuiet)
    assert "sender closed" in scene.library.log


def test_target_that_cannot_be_reached_fails_quietly_at_the_deadline(scene: Scene):
    scene.library.is_reachable = False
    ended = scene.ending(scene.send(deadline_s=0.2))
    assert isinstance(ended, FailedQuiet)
    assert not scene.library.posted


def test_error_ends_the_connection_and_later_batches_never_begin(scene: Scene):
    assert isinstance(scene.ending(scene.send(one_span(1))), Done)
    scene.library.exposed.clear()
    assert isinstance(scene.ending(scene.send()), FailedUnknown)
    num_posted = len(scene.library.posted)
    assert isinstance(scene.ending(scene.send()), FailedQuiet)
    assert len(scene.library.posted) == num_posted


def test_cancelled_batch_waits_for_what_is_in_flight(scene: Scene):
    scene.library.hold()
    ticket = scene.send()
    wait_until(lambda: len(scene.library.posted) == 3)
    scene.source.transport.cancel(ticket)
    time.sleep(0.05)
    assert not scene.source.events(1, 0.0)
    scene.library.gate.release(100)
    assert isinstance(scene.ending(ticket), FailedQuiet)
    assert len(scene.library.posted) == 3
    assert isinstance(scene.ending(scene.send()), Done)


def test_source_hangs_up_after_its_library(scene: Scene):
    """The hang-up tells the target that the source writes no more."""
    assert isinstance(scene.ending(scene.send()), Done)
    writer = scene.target.transport.writers[scene.writer.peer]
    scene.library.log.clear()
    scene.source.transport.disconnect(scene.peer)
    wait_until(lambda: writer.is_gone)
    assert scene.library.log == ["sender closed", "receiver closed"]


def test_peer_that_can_bypass_the_receiver_is_quiet_after_it_hangs_up(scene: Scene):
    scene.library.can_bypass = True
    assert isinstance(scene.ending(scene.send()), Done)
    scene.library.hold()
    ticket = scene.send()
    wait_until(lambda: len(scene.library.posted) > 10)
    assert isinstance(scene.target.revoke(scene.writer.peer), RevokedUnknown)
    assert isinstance(scene.ending(ticket), FailedUnknown)
    wait_until(lambda: isinstance(scene.target.revoke(scene.writer.peer), RevokedQuiet))


def test_dead_target_is_noticed_while_a_batch_is_in_flight(scene: Scene):
    scene.library.hold()
    ticket = scene.send()
    wait_until(lambda: len(scene.library.posted) == 3)
    scene.target.close()
    assert isinstance(scene.ending(ticket), FailedUnknown)


def test_region_that_was_not_granted_is_refused(scene: Scene):
    other = scene.target.expose(SIZE)
    ticket = scene.source.send(scene.peer, scene.held, other, one_span(1))
    ended = scene.ending(ticket)
    assert isinstance(ended, FailedQuiet)
    assert "granted" in ended.cause
    assert isinstance(scene.ending(scene.send()), Done)


def test_invalid_frame_closes_the_receiver_and_the_peer_is_quiet_after_it_hangs_up(scene: Scene):
    scene.library.can_bypass = True
    invitation = scene.target.invite()
    scene.target.grant(invitation.peer, scene.region.number)
    host, _, port = invitation.description.address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(CONNECT_PROBE + make_hello(invitation.description, 0, sock.recv(CHALLENGE_BYTES)))
        assert len(sock.recv(WELCOME_BYTES)) == WELCOME_BYTES
        sock.sendall(encode_frame(FrameKind.ASK, scene.region.number, payload=this_kernel()))
        assert FrameHeader.from_bytes(sock.recv(HEADER_BYTES)).kind is FrameKind.GIVEN
        sock.sendall(b"\xff" * 100)
        wait_until(lambda: "receiver closed" in scene.library.log)
        assert isinstance(scene.target.revoke(invitation.peer), RevokedUnknown)
    wait_until(lambda: isinstance(scene.target.revoke(invitation.peer), RevokedQuiet))


def test_invitation_is_good_for_one_connection(scene: Scene):
    assert isinstance(scene.ending(scene.send()), Done)
    again = scene.source.connect(scene.writer.description)
    ticket = scene.source.send(again, scene.held, scene.region, one_span(1))
    assert isinstance(scene.ending(ticket), FailedQuiet)


def test_empty_and_scattered_batches(scene: Scene):
    assert isinstance(scene.ending(scene.send(spans_of([], [], []))), Done)
    starts = np.arange(0, SIZE, 7)
    assert isinstance(scene.ending(scene.send(spans_of(starts, starts, np.full(len(starts), 3)))), Done)
    assert all(len(post.spans) <= 10 for post in scene.library.posted)


@pytest.mark.parametrize("raw", [b"\0" * HEADER_BYTES, b"\5" + b"\0" * 23, b"\1\0\0\0" + b"\xff" * 20])
def test_nonsense_is_not_a_frame(raw: bytes):
    with pytest.raises(RemoteProtocolError):
        FrameHeader.from_bytes(raw)


def test_frame_is_read_as_it_was_written():
    raw = encode_frame(FrameKind.GIVEN, 7, 2**64 - 1, b"abc")
    assert FrameHeader.from_bytes(raw[:HEADER_BYTES]) == FrameHeader(FrameKind.GIVEN, 3, 7, 2**64 - 1)
    assert raw[HEADER_BYTES:] == b"abc"


def test_kernel_without_an_identity_may_be_this_one():
    assert is_this_kernel(this_kernel())
    assert is_this_kernel(b"")
    assert not is_this_kernel(b"00000000-0000-0000-0000-000000000000")


def test_missing_library_is_named_with_its_remedy():
    with pytest.raises(ConfigError, match=r"no_such_library.* is not installed"):
        import_native(("no_such_library.engine",))
    with pytest.raises(
        ConfigError, match=r"none is not installed; install it with: pip install .*libibverbs1"
    ):
        import_native(("mooncake.none",))


def test_library_that_lacks_another_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lacking.py").write_text("raise ImportError('libother.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=r"lacking: libother\.so\.1"):
        import_native(("lacking",))
