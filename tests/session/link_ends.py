"""Two instances with one secret, and the links between them."""

from collections.abc import Callable

from baton.protocol.handshake import MEMBER, SESSION, Ended, Party, Secure, accepting, dialling
from baton.protocol.messages import Heartbeat, Hello, Introduction, Offer, Proof, Refused
from baton.protocol.wire import STRANGER_BYTES_MAX, Codec, decode, encode, frame
from baton.session.links import Link, LinkEvent, seal

SECRET = b"a secret of the two instances"
CHANNEL = b"c" * 16
DEADLINE = 10.0
PRIVATE = (b"fingerprint-of", b"spec-of", b"transport-of")
"""What is in an introduction and in nothing that a stranger may hear."""


def introduction(instance: str, rank: int = -1, spec: bytes = b"") -> Introduction:
    return Introduction(
        instance=instance,
        epoch=4,
        fingerprint=f"fingerprint-of-{instance}",
        spec=f"spec-of-{instance}".encode() + spec,
        transport=f"transport-of-{instance}",
        rank=rank,
    )


OFFERS = [
    Offer(transfer=f"t{number}", num_tokens=number, digest=b"d" * 16, source_dp=0) for number in range(4)
]
PREFILL = Party(introduction("prefill"), SECRET, accepts=frozenset({SESSION, MEMBER}))
DECODE = Party(introduction("decode"), SECRET)


def dialled(party: Party = DECODE, wanted: str = "prefill", codec: Callable[[Secure], Codec] = seal) -> Link:
    return Link(dialling(party, wanted, b"d" * 32, DEADLINE), codec)


def accepted(party: Party = PREFILL, codec: Callable[[Secure], Codec] = seal) -> Link:
    return Link(accepting(party, b"a" * 32, CHANNEL, DEADLINE), codec)


def shake(dialler: Link, acceptor: Link) -> tuple[list[LinkEvent], list[LinkEvent]]:
    """Lets two links talk until both are silent; answers what happened at each."""
    data, happened = dialler.begin(0.0), ([], [])
    while data:
        happened[1].extend(acceptor.receive(data, 0.0))
        happened[0].extend(dialler.receive(acceptor.replies(), 0.0))
        data = dialler.replies()
    return happened


def standing() -> tuple[Link, Link]:
    """A dialler and an acceptor that are through with it."""
    dialler, acceptor = dialled(), accepted()
    shake(dialler, acceptor)
    assert dialler.is_standing
    assert acceptor.is_standing
    return dialler, acceptor


def cause_of(happened: list[LinkEvent]) -> str:
    """Why a link ended, which has to be the last that happened to it."""
    assert isinstance(happened[-1], Ended), happened
    return str(happened[-1].cause)


def said(data: bytes) -> list[object]:
    """Bare messages of a stream."""
    found, start = [], 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        found.append(decode(data[start + 4 : end]))
        start = end
    return found


FIRST_WORDS = {
    "http": b"GET / HTTP/1.1\r\nHost: baton\r\n\r\n",
    "zeros": b"\0" * 64,
    "too long": (STRANGER_BYTES_MAX + 1).to_bytes(4, "big"),
    "not msgpack": frame(b"\xc1\xc1"),
    "beat": frame(encode(Heartbeat())),
    "proof": frame(encode(Proof(mac=b"m" * 32))),
    "introduction": frame(encode(DECODE.introduction)),
    "refused at once": frame(encode(Refused(cause=standing()[0].refuse("x", 0.0)[0].cause))),
    "hello twice": dialled().begin(0.0) * 2,
    "unknown need": frame(
        encode(
            Hello(
                version_min=1, version_max=1, nonce=b"", purpose="", instance="", epoch=0, needs=("colour",)
            )
        )
    ),
}
"""What somebody may say first who does not shake hands."""
