"""How two ends prove to each other that they hold the secret of one invitation, without sending it.

- source to target, over TCP: one byte, the connect probe, as soon as the connection is established
- target to source: a challenge, which is a nonce
- source to target: a hello with incarnation, peer, stream, a nonce, and a proof over these and the challenge
- target to source: a welcome, which is a proof over the same bytes in the role of the target

The connect probe is for the source's own kernel. If a target stops listening while a connection is being
established, the source may end up with a half-open connection that exists on its side only and reports no
error (Linux 6.18, 7 in 600 under load). Sending a byte there fails at once. A target answers a wrong hello
by closing the connection. What follows on the connection is not signed: an attacker who can write into it
can write into the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import TransportError
from baton.transport.base import Description

CONNECT_PROBE = b"\0"
CHALLENGE_BYTES = 16
WELCOME_BYTES = 32
_HELLO = struct.Struct("<8s16sQQ16s32s")
HELLO_BYTES = _HELLO.size
_MAGIC = b"BATON\0\0\1"


@dataclass(frozen=True, slots=True)
class SourceHello:
    """The identity that a source claims."""

    incarnation: bytes
    peer: int
    stream: int
    nonce: bytes
    proof: bytes


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def make_hello(description: Description, stream: int, challenge: bytes) -> bytes:
    """The source's answer to a challenge."""
    incarnation, nonce = description.incarnation.encode(), secrets.token_bytes(16)
    hello = SourceHello(incarnation, description.peer, stream, nonce, b"")
    proof = _prove(b"source", description.secret, hello, challenge)
    return _HELLO.pack(_MAGIC, incarnation, description.peer, stream, nonce, proof)


def introduce(
    description: Description,
    stream: int,
    send: Callable[[bytes], object],
    receive: Callable[[int], bytes | bytearray],
) -> None:
    """The source's side of a handshake; raises TransportError where the target does not prove itself."""
    challenge = bytes(receive(CHALLENGE_BYTES))
    hello = make_hello(description, stream, challenge)
    send(hello)
    if not verify_welcome(bytes(receive(WELCOME_BYTES)), description, hello, challenge):
        raise TransportError("it did not accept this invitation")


def read_hello(raw: bytes) -> SourceHello | None:
    """An unverified hello, or None if these bytes are not one."""
    if len(raw) != HELLO_BYTES:
        return None
    magic, incarnation, peer, stream, nonce, proof = _HELLO.unpack(raw)
    return SourceHello(incarnation, peer, stream, nonce, proof) if magic == _MAGIC else None


def verify_hello(hello: SourceHello, secret: str, challenge: bytes) -> bool:
    """Whether the sender of a hello holds the secret."""
    return hmac.compare_digest(hello.proof, _prove(b"source", secret, hello, challenge))


def make_welcome(hello: SourceHello, secret: str, challenge: bytes) -> bytes:
    """The target's proof."""
    return _prove(b"target", secret, hello, challenge)


def verify_welcome(raw: bytes, description: Description, hello: bytes, challenge: bytes) -> bool:
    """Whether the sender of a welcome holds the secret."""
    sent = read_hello(hello)
    assert sent is not None
    return hmac.compare_digest(raw, make_welcome(sent, description.secret, challenge))


def _prove(role: bytes, secret: str, hello: SourceHello, challenge: bytes) -> bytes:
    identity = _HELLO.pack(_MAGIC, hello.incarnation, hello.peer, hello.stream, hello.nonce, b"")
    return hmac.digest(secret.encode(), role + challenge + identity, hashlib.sha256)
