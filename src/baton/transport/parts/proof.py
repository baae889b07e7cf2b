"""How two ends show each other that they hold the secret of one invitation, without sending it.

- source to target, over TCP: a knock, one byte, as soon as the connection stands
- target to source: a challenge, which is a nonce
- source to target: hello, with incarnation, peer, stream, a nonce, and a proof over that and the challenge
- target to source: a welcome, which is a proof over the same, as target

The knock is for the source's own kernel. A target that stops listening while a connection forms may leave the
source with one that stands on its side only, and nobody tells it (Linux 6.18, 7 in 600 under load); whoever
sends something there hears at once that nobody has it. A target answers a wrong hello by hanging up. What
follows on the connection is not signed: who can write into it can write into the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from baton.transport.base import Description

KNOCK = b"\0"
CHALLENGE_BYTES = 16
WELCOME_BYTES = 32
_HELLO = struct.Struct("<8s16sQQ16s32s")
HELLO_BYTES = _HELLO.size
_MAGIC = b"BATON\0\0\1"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a source says it is."""

    incarnation: bytes
    peer: int
    stream: int
    nonce: bytes
    proof: bytes


def new_challenge() -> bytes:
    """A nonce that was never used."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def make_hello(description: Description, stream: int, challenge: bytes) -> bytes:
    """The source's answer to a challenge."""
    incarnation, nonce = description.incarnation.encode(), secrets.token_bytes(16)
    hello = Hello(incarnation, description.peer, stream, nonce, b"")
    proof = _prove(b"source", description.secret, hello, challenge)
    return _HELLO.pack(_MAGIC, incarnation, description.peer, stream, nonce, proof)


def read_hello(raw: bytes) -> Hello | None:
    """What a source says, not yet believed; None if it is something else."""
    if len(raw) != HELLO_BYTES:
        return None
    magic, incarnation, peer, stream, nonce, proof = _HELLO.unpack(raw)
    return Hello(incarnation, peer, stream, nonce, proof) if magic == _MAGIC else None


def is_proven(hello: Hello, secret: str, challenge: bytes) -> bool:
    """Whether who says hello holds the secret."""
    return hmac.compare_digest(hello.proof, _prove(b"source", secret, hello, challenge))


def make_welcome(hello: Hello, secret: str, challenge: bytes) -> bytes:
    """The target's proof."""
    return _prove(b"target", secret, hello, challenge)


def is_welcome(raw: bytes, description: Description, hello: bytes, challenge: bytes) -> bool:
    """Whether who answers holds the secret."""
    said = read_hello(hello)
    assert said is not None
    return hmac.compare_digest(raw, make_welcome(said, description.secret, challenge))


def _prove(role: bytes, secret: str, hello: Hello, challenge: bytes) -> bytes:
    said = _HELLO.pack(_MAGIC, hello.incarnation, hello.peer, hello.stream, hello.nonce, b"")
    return hmac.digest(secret.encode(), role + challenge + said, hashlib.sha256)
