"""Messages survive the wire, and nothing else that comes by it does."""

import contextlib
import hashlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.messages import Heartbeat, Hello, Message, Offer, Proof
from baton.protocol.wire import (
    FRAME_BYTES_MAX,
    STRANGER_BYTES_MAX,
    Bare,
    Frames,
    Plain,
    Seal,
    decode,
    encode,
    frame,
)

MESSAGE_TYPES = tuple(Message.__subclasses__())
PRIVATE = "what-the-peer-sent"
KEY = b"k" * 32
OFFER = Offer(transfer="t", num_tokens=3, digest=b"d" * 16, source_dp=1)


def feed(frames: Frames, data: bytes) -> list[bytes]:
    """The payloads that are complete after this."""
    frames.add(data)
    return list(iter(frames.take, None))


def filled(kind: msgspec.inspect.Type) -> Any:
    """A value of a type with something in every field."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: filled(field.type) for field in fields if field.name != "needs"})
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {filled(key): filled(value)}
        case msgspec.inspect.VarTupleType(item_type=item):
            return (filled(item), filled(item))
        case msgspec.inspect.TupleType(item_types=items):
            return tuple(map(filled, items))
        case msgspec.inspect.UnionType(types=types):
            return filled(types[0])
        case msgspec.inspect.EnumType(cls=cls):
            return list(cls)[-1]
        case _:
            plain = {
                "IntType": 7,
                "StrType": "word",
                "BytesType": b"\0\xff",
                "BoolType": True,
                "FloatType": 0.5,
            }
            return {**plain, "NoneType": None}[type(kind).__name__]


def as_map(message: Message, **changes: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(message)), **changes})


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type):
    message = filled(msgspec.inspect.type_info(kind))
    assert type(message) is kind
    assert decode(encode(message)) == message


def test_unknown_optional_field_is_ignored():
    assert decode(as_map(OFFER, colour="red", shape={"a": [1, {}]})) == OFFER


def test_unknown_needed_field_is_refused_by_name():
    with pytest.raises(RemoteProtocolError, match="Offer needs what this version does not know: 'colour'"):
        decode(as_map(OFFER, colour="red", needs=["num_tokens", "colour"]))


def test_known_needed_field_is_taken():
    assert decode(as_map(OFFER, needs=["num_tokens"])).needs == ("num_tokens",)


def test_needed_names_cannot_flood_or_forge_the_log():
    with pytest.raises(RemoteProtocolError) as caught:
        decode(as_map(OFFER, needs=["a\nb" * 5000] * 50))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


BAD_BODIES = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "text": PRIVATE.encode() + b"\r\n",
    "trailing": encode(Heartbeat()) + PRIVATE.encode(),
    "not a map": msgspec.msgpack.encode([PRIVATE]),
    "no type": msgspec.msgpack.encode({"mac": PRIVATE}),
    "unknown type": msgspec.msgpack.encode({"type": PRIVATE}),
    "type not text": msgspec.msgpack.encode({"type": 3}),
    "missing field": as_map(Proof(mac=b""), mac=None),
    "wrong type": as_map(OFFER, num_tokens=PRIVATE),
    "wrong enum": msgspec.msgpack.encode({"type": "refused", "cause": {"why": PRIVATE, "stage": "offer"}}),
    "bad utf-8": encode(OFFER).replace(b"\xa1t", b"\xa1\xff"),
    "huge claim": b"\x82\xa4type\xa4beat\xa5needs\xdd\xff\xff\xff\xff",
    "deep": b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * 50_000 + b"\xc0",
    "big number": as_map(OFFER, num_tokens=2**64 - 1).replace(b"offer", b"hello"),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_anything_else_is_refused_without_its_content(body: bytes):
    with pytest.raises(RemoteProtocolError) as caught:
        decode(body)
    assert PRIVATE not in str(caught.value)
    assert 10 < len(str(caught.value)) < 200


def test_refusal_says_where():
    with pytest.raises(RemoteProtocolError, match=r"Expected `int`, got `str` - at `\$.num_tokens`"):
        decode(as_map(OFFER, num_tokens=PRIVATE))
    with pytest.raises(RemoteProtocolError, match=r"a value that this version does not know, at `\$.type`"):
        decode(msgspec.msgpack.encode({"type": PRIVATE}))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body: bytes):
    with contextlib.suppress(RemoteProtocolError):
        assert type(decode(body)) in MESSAGE_TYPES


VALID = [encode(filled(msgspec.inspect.type_info(kind))) for kind in MESSAGE_TYPES]


@given(st.sampled_from(VALID), st.data())
def test_any_damaged_message_is_a_message_or_refused(valid: bytes, data: st.DataObject):
    body = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not body:
            break
    with contextlib.suppress(RemoteProtocolError):
        assert type(decode(bytes(body))) in MESSAGE_TYPES


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30)))
def test_frames_do_not_depend_on_how_the_stream_is_cut(payloads: list[bytes], cuts: list[int]):
    stream = b"".join(map(frame, payloads))
    frames, found, start = Frames(), [], 0
    for cut in [*cuts, len(stream)]:
        found += feed(frames, stream[start : start + cut])
        start += cut
    found += feed(frames, stream[start:])
    assert found == payloads


def test_long_frame_is_refused_from_its_length_alone():
    with pytest.raises(RemoteProtocolError, match=f"{STRANGER_BYTES_MAX + 1} bytes"):
        feed(Frames(), struct.pack(">I", STRANGER_BYTES_MAX + 1))
    assert feed(Frames(), struct.pack(">I", STRANGER_BYTES_MAX)) == []
    with pytest.raises(RemoteProtocolError):
        feed(Frames(FRAME_BYTES_MAX), struct.pack(">I", FRAME_BYTES_MAX + 1))


def test_limit_may_rise_between_two_frames_of_one_read():
    frames = Frames()
    frames.add(frame(b"a") + frame(b"b" * (STRANGER_BYTES_MAX + 1)))
    assert frames.take() == b"a"
    frames.bytes_max = FRAME_BYTES_MAX
    assert frames.take() == b"b" * (STRANGER_BYTES_MAX + 1)
    assert frames.take() is None


def test_what_is_too_long_to_be_read_is_not_sent():
    with pytest.raises(LocalProtocolError, match="at most"):
        frame(b"x" * (FRAME_BYTES_MAX + 1))


def ends() -> tuple[Seal, Seal]:
    return Seal(KEY, is_dialler=True), Seal(KEY, is_dialler=False)


def test_sealed_frames_open_in_order_both_ways():
    dialler, acceptor = ends()
    for number in range(3):
        assert acceptor.unwrap(dialler.wrap(b"to %d" % number)) == b"to %d" % number
        assert dialler.unwrap(acceptor.wrap(b"fro %d" % number)) == b"fro %d" % number


def test_seal_is_keyed_blake2b_of_direction_position_and_body():
    dialler, acceptor = ends()
    for position in range(2):
        said = struct.pack(">Q", position) + b"body"
        mac = hashlib.blake2b(said, key=KEY, digest_size=16, person=b"dialler").digest()
        assert dialler.wrap(b"body") == b"body" + mac
    assert acceptor.wrap(b"body") != dialler.wrap(b"body")


def refused(seal: Seal, payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="did not send, or not as its next"):
        seal.unwrap(payload)


def test_replayed_frame_is_refused():
    dialler, acceptor = ends()
    payload = dialler.wrap(b"once")
    acceptor.unwrap(payload)
    refused(acceptor, payload)


def test_reordered_or_dropped_frame_is_refused():
    dialler, acceptor = ends()
    dialler.wrap(b"first")
    refused(acceptor, dialler.wrap(b"second"))


def test_reflected_frame_is_refused():
    dialler, acceptor = ends()
    payload = dialler.wrap(b"mine")
    refused(dialler, payload)
    assert acceptor.unwrap(payload) == b"mine"


def test_frame_under_another_key_is_refused():
    refused(Seal(b"x" * 32, is_dialler=False), ends()[0].wrap(b"body"))


@given(st.binary(max_size=64), st.data())
def test_altered_frame_is_refused(body: bytes, data: st.DataObject):
    dialler, acceptor = ends()
    payload = bytearray(dialler.wrap(body))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    refused(acceptor, bytes(payload))


@given(st.binary(max_size=64), st.integers(1, 200))
def test_cut_or_lengthened_frame_is_refused(body: bytes, num_bytes: int):
    dialler, acceptor = ends()
    payload = dialler.wrap(body)
    refused(acceptor, payload[:-num_bytes])
    refused(acceptor, payload + b"\0" * num_bytes)
    assert acceptor.unwrap(payload) == body  # what was refused did not count


def test_plain_frames_open_in_any_order_but_on_their_channel_alone():
    one, other = Plain(b"a" * 16), Plain(b"b" * 16)
    payloads = [one.wrap(b"%d" % number) for number in range(3)]
    assert [Plain(b"a" * 16).unwrap(payload) for payload in reversed(payloads)] == [b"2", b"1", b"0"]
    for payload in (payloads[0], b"", b"b" * 15):
        with pytest.raises(RemoteProtocolError, match="another channel"):
            other.unwrap(payload)


def test_bare_frames_are_the_message():
    hello = encode(Hello(version_min=1, version_max=1, nonce=b"", purpose="", instance="", epoch=0))
    assert Bare().unwrap(Bare().wrap(hello)) == hello
