"""Whoever is refused hears why, and nothing of the instance; whoever misbehaves loses its own link."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.session.link_ends import DECODE, FIRST_WORDS, OFFERS, PREFILL, PRIVATE, dialled, said
from tests.session.loop_world import Loops, converse, hear, opened

from baton.protocol.handshake import Ended, Party
from baton.protocol.messages import Refused
from baton.protocol.outcomes import Why
from baton.session import links
from baton.session.links import SocketConfig

# A socket or a task that nobody closed is a warning, and so an error.
pytestmark = pytest.mark.filterwarnings("error")
HASTY = SocketConfig(handshake_s=0.3, connect_s=0.3)


@pytest.fixture
def loops() -> Iterator[Loops]:
    yield from opened()


REFUSALS = {
    "secret": (
        replace(DECODE, secret=b"another secret, as long"),
        "prefill",
        "the proof does not hold",
    ),
    "version": (replace(DECODE, versions=(7, 8)), "prefill", "versions 3 to 3, the other 7 to 8"),
    "instance": (DECODE, "prefill-2", "instance 'prefill-2' was expected here"),
    "purpose": (replace(DECODE, dials="cousin"), "prefill", "no links for 'cousin'"),
}


@pytest.mark.parametrize(("party", "wanted", "text"), REFUSALS.values(), ids=REFUSALS)
def test_refused_dialler_hears_why_and_the_acceptor_nothing(
    loops: Loops, party: Party, wanted: str, text: str
):
    loop, far = loops.make(PREFILL)
    near_loop, near = loops.make(party)
    loops.dial(near_loop, near, loop.address, wanted)
    ((link, cause),) = near.wait("lost")
    assert text in cause
    expected = Why.REFUSED_VERSION if "versions" in text else Why.REFUSED_AUTHENTICATION
    assert near.causes[0].why is expected
    assert near.wait("dialled") == [(link,)]
    loop.close()
    assert far.told == []


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "host:", ":80", "127.0.0.1:x", "127.0.0.1:70000", "x" * 70 + ":1", "127.0.0.1:1"],
)
def test_address_that_leads_nowhere_is_lost_with_a_reason(loops: Loops, address: str):
    loop, near = loops.make(DECODE)
    loops.dial(loop, near, address)
    ((_, cause),) = near.wait("lost")
    assert near.causes[0].why is Why.PEER_LOST
    assert "host:port is needed" in cause or f"cannot reach {address}: " in cause


def test_connecting_takes_a_limited_time(loops: Loops):
    loop, near = loops.make(DECODE, config=HASTY)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = f"127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        loops.dial(loop, near, address)
        assert near.wait("lost")[0][1] == f"cannot reach {address}: no answer in time"
        for sock in waiting:
            sock.close()


def test_acceptor_that_says_nothing_is_given_up(loops: Loops):
    loop, near = loops.make(DECODE, config=HASTY)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        loops.dial(loop, near, f"127.0.0.1:{silent.getsockname()[1]}")
        sock, _ = silent.accept()
        assert "still greeting at its deadline" in near.wait("lost")[0][1]
        assert near.causes[0].why is Why.DEADLINE
        heard = said(hear(sock))
        sock.close()
    assert isinstance(heard[-1], Refused)


def assert_refused(heard: bytes) -> Refused:
    assert not [word for word in PRIVATE if word in heard]
    last = said(heard)[-1]
    assert isinstance(last, Refused)
    return last


@pytest.mark.parametrize("words", FIRST_WORDS.values(), ids=FIRST_WORDS)
def test_stranger_hears_a_reason_and_no_introduction(loops: Loops, words: bytes):
    loop, far = loops.make(PREFILL)
    sock = loops.connect(loop.address)
    sock.sendall(words)
    assert_refused(hear(sock))
    converse(loops.connect(loop.address), dialled())
    assert len(far.wait("linked")) == len(far.told) == 1


def test_flood_is_cut_off_and_the_reason_still_heard(loops: Loops):
    loop, far = loops.make(PREFILL)
    sock = loops.connect(loop.address)
    sock.sendall(b"\xff" * 300_000)
    assert "at most 65536" in assert_refused(hear(sock)).cause.text
    assert far.told == []


def test_truncated_handshake_is_dropped(loops: Loops):
    loop, far = loops.make(PREFILL)
    sock = loops.connect(loop.address)
    sock.sendall(dialled().begin(0.0)[:-1])
    sock.shutdown(socket.SHUT_WR)
    assert hear(sock) == b""
    assert far.told == []


@pytest.mark.parametrize("num_frames", [0, 1])
def test_peer_that_stops_in_its_handshake_hears_that_time_is_over(loops: Loops, num_frames: int):
    loop, far = loops.make(PREFILL, config=HASTY)
    sock = loops.connect(loop.address)
    if num_frames:
        sock.sendall(dialled().begin(0.0))
    assert assert_refused(hear(sock)).cause.why.value == "deadline passed"
    assert far.told == []


def test_drip_does_not_stretch_the_handshake(loops: Loops):
    loop, _ = loops.make(PREFILL, config=HASTY)
    began, heard = time.monotonic(), b""
    sock = loops.connect(loop.address)
    sock.settimeout(0.02)
    for byte in dialled().begin(0.0):
        try:
            sock.sendall(bytes([byte]))
            heard += sock.recv(4096)
        except TimeoutError:
            continue
        break
    assert time.monotonic() - began >= 0.25
    assert assert_refused(heard).cause.why.value == "deadline passed"


def test_no_more_strangers_than_allowed(loops: Loops, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "HANDSHAKES_MAX", 2)
    loop, far = loops.make(PREFILL)
    for _ in range(3):
        converse(loops.connect(loop.address), dialled())  # no strangers any more
    far.wait("linked", 3)
    waiting = [loops.connect(loop.address) for _ in range(2)]
    for sock in waiting:  # both are inside once they got an answer
        sock.sendall(dialled().begin(0.0))
        assert sock.recv(4096)
    assert hear(loops.connect(loop.address)) == b""
    waiting[0].close()
    far.told.clear()
    while not far.told:
        try:
            converse(loops.connect(loop.address), dialled())
        except (AssertionError, OSError):
            continue
        far.wait("linked")


@pytest.mark.parametrize("change", ["replayed", "altered", "oversized"])
def test_peer_that_misbehaves_loses_its_link_alone(loops: Loops, change: str):
    loop, far = loops.make(PREFILL)
    good = converse(good_sock := loops.connect(loop.address), dialled())
    bad = converse(sock := loops.connect(loop.address), dialled())
    frame = bad.send(OFFERS[0])
    damage = {"replayed": frame, "altered": bad.send(OFFERS[1])[:-1] + b"\0", "oversized": b"\xff" * 4}
    sock.sendall(frame + damage[change])
    happened = bad.receive(hear(sock), 0.0)
    assert isinstance(happened[-1], Ended)
    ((link, _),) = far.wait("lost")
    assert far.causes == [happened[-1].cause]
    assert far.wait("received") == [(link, OFFERS[0])]
    good_sock.sendall(good.send(OFFERS[2]))
    assert far.messages(2) == [OFFERS[0], OFFERS[2]]
