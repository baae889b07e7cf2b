"""A link without its socket: what it makes of bytes that are right, damaged, hostile or late."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.session.link_ends import (
    CHANNEL,
    DEADLINE,
    DECODE,
    FIRST_WORDS,
    OFFERS,
    PREFILL,
    PRIVATE,
    accepted,
    cause_of,
    dialled,
    introduction,
    said,
    shake,
    standing,
)

from baton.errors import LocalProtocolError
from baton.protocol.handshake import Ended, Established, Secure
from baton.protocol.messages import Accepted, Challenge, Heartbeat, Proof, Refused
from baton.protocol.outcomes import Why
from baton.protocol.wire import STRANGER_BYTES_MAX, Plain, encode, frame
from baton.session.links import Link


def plain(secure: Secure) -> Plain:
    return Plain(secure.channel)


def test_handshake_establishes_both_ends_with_the_others_introduction():
    dialler, acceptor = dialled(), accepted()
    assert shake(dialler, acceptor) == (
        [Established(PREFILL.introduction, CHANNEL)],
        [Established(DECODE.introduction, CHANNEL)],
    )


def test_messages_pass_both_ways_and_in_order():
    dialler, acceptor = standing()
    assert acceptor.receive(b"".join(map(dialler.send, OFFERS)), 0.0) == OFFERS
    assert dialler.receive(acceptor.send(Heartbeat()), 0.0) == [Heartbeat()]
    assert (dialler.replies(), acceptor.replies()) == (b"", b"")


def test_stream_may_come_in_single_bytes():
    dialler, acceptor = dialled(), accepted()
    data, at_acceptor = dialler.begin(0.0), []
    while data:
        for byte in data:
            at_acceptor += acceptor.receive(bytes([byte]), 0.0)
        for byte in acceptor.replies():
            dialler.receive(bytes([byte]), 0.0)
        data = dialler.replies()
    assert at_acceptor == [Established(DECODE.introduction, CHANNEL)]
    assert dialler.is_standing


def test_large_introduction_may_come_in_one_read_with_the_acceptance():
    large = replace(PREFILL, introduction=introduction("prefill", spec=b"x" * (2 * STRANGER_BYTES_MAX)))
    happened, _ = shake(dialled(), accepted(large))
    assert happened == [Established(large.introduction, CHANNEL)]


def test_nothing_is_sent_before_the_link_stands():
    dialler = dialled()
    dialler.begin(0.0)
    with pytest.raises(LocalProtocolError, match="Heartbeat on a link that is greeting"):
        dialler.send(Heartbeat())


def test_wrong_secret_is_told_and_gets_no_introduction():
    dialler, acceptor = dialled(replace(DECODE, secret=b"another secret, as long")), accepted()
    heard = b""
    data = dialler.begin(0.0)
    for _ in range(2):
        acceptor.receive(data, 0.0)
        heard += (answer := acceptor.replies())
        happened = dialler.receive(answer, 0.0)
        data = dialler.replies()
    assert [type(message) for message in said(heard)] == [Challenge, Refused]
    assert "refused (authentication) at handshake on prefill: the proof does not hold" in cause_of(happened)
    assert not [word for word in PRIVATE if word in heard]


@pytest.mark.parametrize("words", FIRST_WORDS.values(), ids=FIRST_WORDS)
def test_stranger_gets_a_reason_and_nothing_more(words: bytes):
    acceptor = accepted()
    happened = acceptor.receive(words, 0.0)
    heard = acceptor.replies()
    assert [type(what) for what in happened] == [Ended]
    assert happened[0].cause.why is Why.REFUSED_AUTHENTICATION
    last = said(heard)[-1]
    assert isinstance(last, Refused)
    assert last.cause.text
    assert not [word for word in PRIVATE if word in heard]
    assert acceptor.receive(dialled().begin(0.0), 0.0) == []
    assert acceptor.replies() == b""


@pytest.mark.parametrize("change", ["replayed", "swapped", "reflected", "altered", "cut", "another link's"])
def test_frame_that_is_not_the_peers_next_ends_the_link(change: str):
    dialler, acceptor = standing()
    first, second = dialler.send(OFFERS[0]), dialler.send(OFFERS[1])
    data = {
        "replayed": first + first,
        "swapped": second + first,
        "reflected": acceptor.send(OFFERS[0]),
        "altered": first[:-20] + b"\xff" + first[-19:],
        "cut": frame(first[4:-1]),
        "another link's": shake_other(),
    }[change]
    happened = acceptor.receive(data, 0.0)
    assert happened[:-1] == ([OFFERS[0]] if change == "replayed" else [])
    assert happened[-1].cause.why is Why.REFUSED_AUTHENTICATION
    assert "did not send, or not as its next" in cause_of(happened)
    assert "refused (authentication)" in cause_of(dialler.receive(acceptor.replies(), 0.0))


def shake_other() -> bytes:
    dialler, acceptor = dialled(), Link(replace(accepted().handshake, nonce=b"z" * 32))
    shake(dialler, acceptor)
    return dialler.send(OFFERS[0])


def test_messages_before_the_bad_one_are_not_lost():
    dialler, acceptor = standing()
    good = dialler.send(OFFERS[0]) + dialler.send(OFFERS[1])
    happened = acceptor.receive(good + b"\xff\xff\xff\xff", 0.0)
    assert happened[:2] == OFFERS[:2]
    assert "a frame of 4294967295 bytes" in cause_of(happened)


@pytest.mark.parametrize("message", [Proof(mac=b""), Accepted(mac=b"", channel=b""), DECODE.introduction])
def test_handshake_does_not_begin_again_on_a_link_that_stands(message: object):
    dialler, acceptor = standing()
    happened = acceptor.receive(dialler.send(message), 0.0)  # type: ignore[arg-type]
    assert "has no place in state standing" in cause_of(happened)
    assert happened[-1].cause.why is Why.REFUSED_VERSION


def test_unknown_message_of_a_known_peer_is_a_matter_of_version():
    dialler, acceptor = standing()
    cause = cause_of(acceptor.receive(dialler.send(Heartbeat(needs=("colour",))), 0.0))
    assert "refused (version)" in cause
    assert "colour" in cause


def test_handshake_that_stops_ends_at_its_deadline_with_a_reason():
    acceptor = accepted()
    acceptor.receive(dialled().begin(0.0), 0.0)
    acceptor.replies()
    assert acceptor.expire(DEADLINE - 0.1) == []
    assert "deadline passed at handshake" in cause_of(acceptor.expire(DEADLINE))
    assert isinstance(said(acceptor.replies())[0], Refused)
    assert acceptor.expire(DEADLINE + 1) == []


def test_driver_may_refuse_a_peer_that_stands():
    dialler, acceptor = standing()
    assert cause_of(acceptor.refuse("Offer twice", 0.0)) == cause_of(dialler.receive(acceptor.replies(), 0.0))
    with pytest.raises(LocalProtocolError, match="ended"):
        acceptor.send(Heartbeat())


def test_plain_links_shake_hands_alike_and_take_frames_in_any_order():
    dialler, acceptor = dialled(codec=plain), accepted(codec=plain)
    happened = shake(dialler, acceptor)
    assert [type(what) for what in (*happened[0], *happened[1])] == [Established, Established]
    frames = [dialler.send(offer) for offer in OFFERS]
    assert [acceptor.receive(data, 0.0) for data in (*reversed(frames), frames[0])] == [
        *([offer] for offer in reversed(OFFERS)),
        [OFFERS[0]],
    ]
    stale = Plain(b"e" * 16).wrap(encode(OFFERS[0]))
    assert "another channel" in cause_of(acceptor.receive(frame(stale), 0.0))


@given(st.lists(st.binary(max_size=60), max_size=5), st.booleans())
def test_no_bytes_of_a_stranger_raise_or_bring_an_introduction_out(parts: list[bytes], is_framed: bool):
    acceptor = accepted()
    heard = b""
    for part in parts:
        happened = acceptor.receive(frame(part) if is_framed else part, 0.0)
        assert not [what for what in happened if not isinstance(what, Ended)]
        heard += acceptor.replies()
    assert not acceptor.is_standing
    assert not [word for word in PRIVATE if word in heard]


@given(st.data())
def test_no_damage_to_a_handshake_gets_past_it(data: st.DataObject):
    """One byte of the conversation is changed: either end may stop, and none is fooled."""
    dialler, acceptor = dialled(), accepted()
    position, mask = data.draw(st.integers(0, 700)), data.draw(st.integers(1, 255))
    num_passed = 0

    def through(raw: bytes) -> bytes:
        nonlocal num_passed
        damaged = bytearray(raw)
        if num_passed <= position < num_passed + len(raw):
            damaged[position - num_passed] ^= mask
        num_passed += len(raw)
        return bytes(damaged)

    happened: list[object] = []
    words = through(dialler.begin(0.0))
    while words:
        happened += acceptor.receive(words, 0.0)
        happened += dialler.receive(through(acceptor.replies()), 0.0)
        words = through(dialler.replies())
    if position < num_passed:
        assert not (dialler.is_standing and acceptor.is_standing)
    for what in happened:
        if isinstance(what, Established):
            assert what.introduction in (DECODE.introduction, PREFILL.introduction)
            assert what.channel == CHANNEL
