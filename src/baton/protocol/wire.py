"""Messages as bytes, and bytes as frames.

A message is a msgpack map; a frame is its length in four bytes, then what a codec makes of the message:

    Bare      the message alone, while the handshake runs
    Seal      the message and a MAC over direction, position and message: what is replayed, reordered,
              reflected or altered does not open
    Plain     the id of the channel and the message: for a simulated network, which reorders frames itself

The MAC is keyed BLAKE2b of 16 bytes. Nearly all messages are small, and there it takes a quarter of the time
of HMAC-SHA256, whose objects are slow to copy; only page tables of more than some 10,000 bytes take longer.

What a peer sends is refused with the reason and never with the content, which may be anything.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from functools import reduce
from operator import or_
from typing import Protocol

import msgspec

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.messages import Message

STRANGER_BYTES_MAX = 64 << 10
"""Largest frame of a peer that has not proven the secret."""
FRAME_BYTES_MAX = 64 << 20
MAC_BYTES = 16
CHANNEL_BYTES = 16

_LENGTH = struct.Struct(">I")
_POSITION = struct.Struct(">Q")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(reduce(or_, Message.__subclasses__()))


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(body: bytes) -> Message:
    """The message in these bytes; raises RemoteProtocolError on anything else."""
    try:
        message: Message = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"not a message of ours: {_reason(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RemoteProtocolError("not a message: the bytes are not msgpack") from None
    except RecursionError:
        raise RemoteProtocolError("not a message: nested too deep") from None
    if message.needs:
        _check_needs(message)
    return message


def _check_needs(message: Message) -> None:
    unknown = [name for name in message.needs if name not in message.__struct_fields__]
    if unknown:
        names = ", ".join(_shown(name) for name in unknown[:4])
        raise RemoteProtocolError(
            f"{type(message).__name__} needs what this version does not know: {names}; upgrade this side"
        )


def _shown(name: str) -> str:
    """A field name as a peer gave it, fit for a log."""
    return ascii(name[:40])


def _reason(text: str) -> str:
    """What was wrong and where. Only these two texts are free of what the peer sent."""
    fault, _, where = text.rpartition(" - at ")
    if text.startswith(("Expected `", "Object missing required field")):
        return text
    return f"a value that this version does not know, at {where}" if fault else "a value that cannot be read"


def frame(payload: bytes) -> bytes:
    """A payload as it is sent."""
    if len(payload) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a message of {len(payload)} bytes; at most {FRAME_BYTES_MAX} can be sent")
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream into payloads; one that announces more than `bytes_max` is refused before it is kept."""

    def __init__(self, bytes_max: int = STRANGER_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._kept = bytearray()
        self._start = 0

    def add(self, data: bytes | memoryview) -> None:
        """Adds what came."""
        self._kept += data

    def take(self) -> bytes | None:
        """The next payload, if it is complete; the limit may be changed between two."""
        kept, start = self._kept, self._start
        if len(kept) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(kept, start)
            if num_bytes > self.bytes_max:
                raise RemoteProtocolError(f"a frame of {num_bytes} bytes; at most {self.bytes_max} are taken")
            end = start + _LENGTH.size + num_bytes
            if len(kept) >= end:
                self._start = end
                return bytes(memoryview(kept)[start + _LENGTH.size : end])
        if start:
            del kept[:start]
            self._start = 0
        return None


class Codec(Protocol):
    """Makes payloads of messages, and messages of payloads."""

    def wrap(self, body: bytes) -> bytes:
        """The payload that carries these bytes."""

    def unwrap(self, payload: bytes) -> bytes:
        """The bytes that a payload carries; raises if it is not what the peer sent next."""


class Bare:
    """Nothing but the message: the handshake's codec."""

    def wrap(self, body: bytes) -> bytes:
        """The message itself."""
        return body

    def unwrap(self, payload: bytes) -> bytes:
        """The payload itself."""
        return payload


class Seal:
    """A MAC under the session key over direction, position and message."""

    def __init__(self, key: bytes, *, is_dialler: bool) -> None:
        dialler, acceptor = (
            hashlib.blake2b(key=key, digest_size=MAC_BYTES, person=label)
            for label in (b"dialler", b"acceptor")
        )
        self._sent, self._taken = (dialler, acceptor) if is_dialler else (acceptor, dialler)
        self._num_sent = 0
        self._num_taken = 0

    def wrap(self, body: bytes) -> bytes:
        """The message and its MAC."""
        mac = _mac(self._sent, self._num_sent, body)
        self._num_sent += 1
        return body + mac

    def unwrap(self, payload: bytes) -> bytes:
        """The message, if its MAC is that of the peer's next frame."""
        body, mac = payload[:-MAC_BYTES], payload[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._taken, self._num_taken, body)):
            raise RemoteProtocolError("a frame that the peer did not send, or not as its next")
        self._num_taken += 1
        return body


def _mac(keyed: hashlib.blake2b, position: int, body: bytes) -> bytes:
    # A copy, because the key is half of the work for a small message.
    digest = keyed.copy()
    digest.update(_POSITION.pack(position))
    digest.update(body)
    return digest.digest()


class Plain:
    """The channel's id and the message: no secret and no order, for simulated networks alone."""

    def __init__(self, channel: bytes) -> None:
        self._channel = channel

    def wrap(self, body: bytes) -> bytes:
        """The message behind the channel's id."""
        return self._channel + body

    def unwrap(self, payload: bytes) -> bytes:
        """The message, if it is of this channel."""
        if payload[: len(self._channel)] != self._channel:
            raise RemoteProtocolError("a frame of another channel")
        return payload[len(self._channel) :]
