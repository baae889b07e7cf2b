"""The small parts of the registry, each on its own and without waiting."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.session.registry_world import member

from baton.session.registry import Change, ChangeKind, RegistryError, Topology
from baton.session.registry import messages as auth
from baton.session.registry.client import Backoff, EventReader
from baton.session.registry.messages import Verifier, sign
from baton.session.registry.server import BEAT, encode
from baton.session.registry.state import Expiries

SECRET = b"k" * 16
REQUEST = ("PUT", "/v1/x?y=1", b"body")
NONCE = "0123456789abcdef" * 2


def test_the_signature_is_what_the_page_says() -> None:
    digest = hashlib.sha256(b"body").hexdigest()
    text = f"baton-registry-1\nPUT\n/v1/x?y=1\n{digest}\n1000.500000\n{NONCE}"
    mac = hmac.new(SECRET, text.encode(), "sha256").hexdigest()
    assert sign(SECRET, REQUEST, 1000.5, NONCE) == f"Baton 1000.500000:{NONCE}:{mac}"


@pytest.mark.parametrize(
    ("signed_at", "now", "is_taken"),
    [(1000, 1000, True), (1000, 1030, True), (1000, 1030.1, False), (1030, 1000, True), (1031, 1000, False)],
)
def test_the_window(signed_at: float, now: float, is_taken: bool) -> None:
    reason = Verifier(SECRET, 0.0).refusal(REQUEST, sign(SECRET, REQUEST, signed_at, NONCE), now)
    assert (reason is None) == is_taken


@pytest.mark.parametrize("first", [970.0, 1000.0, 1030.0])
def test_a_nonce_is_known_for_as_long_as_its_time_could_be_taken(first: float) -> None:
    """Seen at any moment of its window and replayed at any later one, among other traffic."""
    header = sign(SECRET, REQUEST, 1000.0, NONCE)
    verifier = Verifier(SECRET, 0.0)
    assert verifier.refusal(REQUEST, header, first) is None
    for tenths in range(int(first * 10), 10_310, 3):
        now = tenths / 10
        other = sign(SECRET, REQUEST, now, f"{tenths:032x}")
        assert verifier.refusal(REQUEST, other, now) is None
        assert verifier.refusal(REQUEST, header, now) is not None


def test_nonces_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr(auth, "NUM_NONCES_MAX", 100)
    verifier = Verifier(SECRET, 0.0)

    def taken(count: int, now: float) -> int:
        headers = (sign(SECRET, REQUEST, now, f"{now:016.0f}{index:016x}") for index in range(count))
        return sum(verifier.refusal(REQUEST, header, now) is None for header in headers)

    assert taken(120, 1000.0) == 100
    assert taken(120, 1060.0) == 100


def test_a_wrong_mac_uses_no_nonce_up() -> None:
    verifier = Verifier(SECRET, 0.0)
    forged = sign(b"another secret", REQUEST, 1000.0, NONCE)
    assert "MAC" in verifier.refusal(REQUEST, forged, 1000.0)
    assert verifier.refusal(REQUEST, sign(SECRET, REQUEST, 1000.0, NONCE), 1000.0) is None


def test_backoff_doubles_to_its_most_with_jitter_and_begins_anew() -> None:
    for chance, factor in ((0.0, 0.5), (1.0, 1.0)):
        backoff = Backoff(0.1, 1.0, lambda chance=chance: chance)
        waits = [backoff.next() for _ in range(6)]
        assert waits == pytest.approx([factor * wait for wait in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)])
        backoff.reset()
        assert backoff.next() == pytest.approx(factor * 0.1)
    assert Backoff(0.1, 0.02, lambda: 1.0).next() == pytest.approx(0.02)


@given(st.lists(st.tuples(st.sampled_from("sdp"), st.integers(0, 5), st.integers(0, 20)), max_size=200))
def test_deadlines_are_a_sorted_dict(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Expiries[tuple[int]] = Expiries()
    plain: dict[tuple[int], int] = {}
    for name, number, at in steps:
        key = (number,)
        match name:
            case "s":
                deadlines.set(key, at)
                plain[key] = at
            case "d":
                deadlines.drop(key)
                plain.pop(key, None)
            case "p":
                due = list(deadlines.pop_due(at))
                assert [plain[key] for key in due] == sorted(time for time in plain.values() if time <= at)
                plain = {key: time for key, time in plain.items() if time > at}
        assert deadlines.next() == min(plain.values(), default=None)
        assert len(deadlines._heap) <= 2 * len(plain) + 65


TOPOLOGY = Topology("b-0", (), ())
CHANGE = Change("b-1", ChangeKind.EXPIRED, member(fingerprint='a: "b" \\n'), False)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_survive_any_cut_and_strange_company(size: int) -> None:
    strange = b"event: later\ndata: {}\n\n\n\nnonsense\n\nretry: 5\n\n"
    data = encode(TOPOLOGY) + BEAT + strange + encode(CHANGE) + BEAT
    reader = EventReader()
    found = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    assert found == [TOPOLOGY, CHANGE]


@pytest.mark.parametrize("data", [b"event: change\ndata: {}\n\n", b"event: topology\ndata: \xff\n\n"])
def test_an_event_that_cannot_be_read_is_an_error(data: bytes) -> None:
    with pytest.raises(RegistryError, match="is this a registry"):
        list(EventReader().feed(data))


def test_an_event_without_an_end_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("baton.session.registry.client.EVENT_BYTES_MAX", 100)
    with pytest.raises(RegistryError, match="longer than 100 bytes"):
        list(EventReader().feed(b"x" * 101))
