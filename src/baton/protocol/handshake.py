"""How the two ends of a link authenticate each other.

    dialler -> acceptor    hello: versions, a nonce, who it is and for what it calls
    acceptor -> dialler    challenge: the version taken, a nonce, who it is
    dialler -> acceptor    proof: a MAC under the shared secret over all of that, as dialler
    acceptor -> dialler    accepted: a MAC over the same and the channel's id, as acceptor
    both                   introduction, sealed under the session key

The dialler proves itself first: an acceptor computes nothing under the secret for a stranger. Both MACs cover
every field of the messages before, so that a man in the middle cannot change a version or a name, and each
MAC names its role, so that neither can be reflected. The session key is derived from the secret and the same
fields. Nonces and the channel's id are given to the record, like the secret: nothing here is random.

A rank that knows the address of its coordinator and not its epoch says epoch 0 in its hello. It takes the
epoch of the challenge: both MACs cover it, so the rank proves itself to that incarnation alone. It introduces
itself with it once the acceptor's proof holds. Nobody else may leave its epoch out.

An end that refuses says why, in one message, and the link ends. Before the proof it tells no more than its
own name, its epoch and its versions.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.protocol.machine import IGNORED, Effects, Entry, Table, Ticked, cell, replace
from baton.protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Accepted,
    Challenge,
    Hello,
    Introduction,
    Proof,
    Refused,
    Span,
)
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.wire import CHANNEL_BYTES

NONCE_BYTES = 32
SESSION = "session"
MEMBER = "member"


class HandshakeState(Enum):
    """How far a handshake is; the dialler's way is the first row, the acceptor's the second."""

    CALLING, GREETING, PROVING = "calling", "greeting", "proving"
    LISTENING, CHALLENGING = "listening", "challenging"
    INTRODUCING, STANDING, ENDED = "introducing", "standing", "ended"


@dataclass(frozen=True, slots=True)
class Party:
    """One end: as whom it introduces itself, which links it dials and accepts, and the secret."""

    introduction: Introduction
    secret: bytes = field(repr=False)
    dials: str = SESSION
    accepts: frozenset[str] = frozenset()
    versions: Span = (VERSION_MIN, VERSION_MAX)
    """The first and the last that it speaks."""

    @property
    def instance(self) -> str:
        """The name that a dialler asks for."""
        return self.introduction.instance


@dataclass(frozen=True, slots=True)
class Handshake:
    """The record of a handshake at one end."""

    state: HandshakeState
    own: Party
    nonce: bytes
    deadline: float
    wanted: str | None = None
    """The instance that the dialler expects, empty if any will do; None at the acceptor."""
    channel: bytes = b""
    """Of the acceptor's making."""
    hello: Hello | None = None
    challenge: Challenge | None = None

    @property
    def is_dialler(self) -> bool:
        """Which end this is."""
        return self.wanted is not None


@dataclass(frozen=True, slots=True)
class Connected:
    """The dialler's connection is there."""


@dataclass(frozen=True, slots=True)
class BadMessage:
    """The peer sent what has no place here, or is no message at all."""

    why: Why
    text: str


# Effects. A message among them is sent, under the codec in force.


@dataclass(frozen=True, slots=True)
class Secure:
    """Everything after this is sealed, both ways."""

    key: bytes = field(repr=False)
    channel: bytes
    is_dialler: bool


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake held and the peer introduced itself."""

    introduction: Introduction
    channel: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The link is over; what was sent before is still to go out."""

    cause: Cause


Step: TypeAlias = tuple[Handshake, Effects]


def dialling(own: Party, wanted: str, nonce: bytes, deadline: float) -> Handshake:
    """A handshake that this end begins, with the instance it wants to find (empty: any)."""
    assert len(nonce) == NONCE_BYTES
    return Handshake(HandshakeState.CALLING, own, nonce, deadline, wanted=wanted)


def accepting(own: Party, nonce: bytes, channel: bytes, deadline: float) -> Handshake:
    """A handshake that the other end begins, with the id of the channel it may lead to."""
    assert (len(nonce), len(channel)) == (NONCE_BYTES, CHANNEL_BYTES)
    return Handshake(HandshakeState.LISTENING, own, nonce, deadline, channel=channel)


def _begin(record: Handshake, event: Connected, now: float) -> Step:
    own = record.own.introduction
    hello = Hello(
        version_min=record.own.versions[0],
        version_max=record.own.versions[1],
        nonce=record.nonce,
        purpose=record.own.dials,
        instance=own.instance,
        epoch=own.epoch,
        rank=own.rank,
    )
    return replace(record, state=HandshakeState.GREETING, hello=hello), (hello,)


def _challenge(record: Handshake, hello: Hello, now: float) -> Step:
    first, last = record.own.versions
    version = min(last, hello.version_max)
    if version < max(first, hello.version_min):
        return _refuse(
            record, Why.REFUSED_VERSION, _apart((first, last), (hello.version_min, hello.version_max))
        )
    if len(hello.nonce) != NONCE_BYTES:
        return _refuse(record, Why.REFUSED_AUTHENTICATION, _wrong_nonce(hello.nonce))
    challenge = Challenge(
        version=version, nonce=record.nonce, instance=record.own.instance, epoch=record.own.introduction.epoch
    )
    return replace(record, state=HandshakeState.CHALLENGING, hello=hello, challenge=challenge), (challenge,)


def _prove(record: Handshake, challenge: Challenge, now: float) -> Step:
    first, last = record.own.versions
    if not first <= challenge.version <= last:
        return _refuse(
            record, Why.REFUSED_VERSION, _apart((first, last), (challenge.version, challenge.version))
        )
    if record.wanted and challenge.instance != record.wanted:
        text = f"instance {record.wanted!a} was expected here; look its address up again"
        return _refuse(record, Why.REFUSED_AUTHENTICATION, text)
    if len(challenge.nonce) != NONCE_BYTES:
        return _refuse(record, Why.REFUSED_AUTHENTICATION, _wrong_nonce(challenge.nonce))
    if not record.own.introduction.epoch and challenge.epoch < 1:
        text = f"the coordinator has epoch {challenge.epoch}; a rank can attach to 1 or more"
        return _refuse(record, Why.REFUSED_AUTHENTICATION, text)
    after = replace(record, state=HandshakeState.PROVING, challenge=challenge)
    return after, (Proof(mac=_mac(after, "dialler")),)


def _accept(record: Handshake, proof: Proof, now: float) -> Step:
    if not hmac.compare_digest(proof.mac, _mac(record, "dialler")):
        return _refuse(
            record, Why.REFUSED_AUTHENTICATION, "the proof does not hold; use record secret on both sides"
        )
    if misfit := _misfit(record):
        return _refuse(record, Why.REFUSED_AUTHENTICATION, misfit)
    accepted = Accepted(mac=_mac(record, "acceptor", record.channel), channel=record.channel)
    return replace(record, state=HandshakeState.INTRODUCING), (accepted, *_sealed(record))


def _misfit(record: Handshake) -> str:
    """Why a peer that knows the secret is refused all the same; empty if it is not."""
    assert record.hello is not None
    purpose, rank = record.hello.purpose, record.hello.rank
    if purpose not in record.own.accepts:
        return f"this end takes no links for {purpose[:40]!a}"
    if (rank >= 0) != (purpose == MEMBER):
        return f"rank {rank} cannot have a {purpose} link"
    if purpose != MEMBER and not record.hello.epoch:
        return "only a rank may leave its epoch out"
    if purpose == MEMBER and record.hello.instance != record.own.instance:
        return f"a rank of another instance cannot be a member of {record.own.instance}"
    return ""


def _secure(record: Handshake, accepted: Accepted, now: float) -> Step:
    is_proven = hmac.compare_digest(accepted.mac, _mac(record, "acceptor", accepted.channel))
    if not is_proven or len(accepted.channel) != CHANNEL_BYTES:
        return _refuse(
            record, Why.REFUSED_AUTHENTICATION, "the proof does not hold; use record secret on both sides"
        )
    after = replace(record, state=HandshakeState.INTRODUCING, channel=accepted.channel)
    return after, _sealed(after)


def _sealed(record: Handshake) -> Effects:
    assert record.challenge is not None
    key, introduction = _mac(record, "session key", record.channel), record.own.introduction
    if record.is_dialler and not introduction.epoch:
        introduction = msgspec.structs.replace(introduction, epoch=record.challenge.epoch)
    return Secure(key, record.channel, record.is_dialler), introduction


def _establish(record: Handshake, introduction: Introduction, now: float) -> Step:
    assert record.hello is not None
    assert record.challenge is not None
    hello, challenge = record.hello, record.challenge
    shaken = (hello.instance, hello.epoch or challenge.epoch, hello.rank)
    if record.is_dialler:
        shaken = (challenge.instance, challenge.epoch, -1)
    if (introduction.instance, introduction.epoch, introduction.rank) != shaken:
        return _refuse(record, Why.REFUSED_AUTHENTICATION, "the introduction does not match the handshake")
    return replace(record, state=HandshakeState.STANDING), (Established(introduction, record.channel),)


def _heard_refusal(record: Handshake, refused: Refused, now: float) -> Step:
    return replace(record, state=HandshakeState.ENDED), (Ended(refused.cause),)


def _time_out(record: Handshake, event: Ticked, now: float) -> Step:
    if now < record.deadline:
        return record, ()
    return _refuse(record, Why.DEADLINE, f"the handshake was still {record.state.value} at its deadline")


def _give_up(record: Handshake, event: BadMessage, now: float) -> Step:
    return _refuse(record, event.why, event.text)


def _refuse(record: Handshake, why: Why, text: str) -> Step:
    own = record.own.introduction
    cause = Cause(why, Stage.HANDSHAKE, instance=own.instance, rank=own.rank, text=text)
    return replace(record, state=HandshakeState.ENDED), (Refused(cause=cause), Ended(cause))


def _apart(ours: Span, theirs: Span) -> str:
    return (
        f"this end speaks versions {ours[0]} to {ours[1]}, the other {theirs[0]} to {theirs[1]}; "
        "upgrade the older"
    )


def _wrong_nonce(nonce: bytes) -> str:
    return f"a nonce of {len(nonce)} bytes; {NONCE_BYTES} are needed"


def _mac(record: Handshake, label: str, channel: bytes = b"") -> bytes:
    """A MAC over everything both sent, for one purpose alone."""
    hello, challenge = record.hello, record.challenge
    assert hello is not None
    assert challenge is not None
    dialler = (hello.version_min, hello.version_max, hello.nonce, hello.instance, hello.epoch, hello.rank)
    acceptor = (challenge.version, challenge.nonce, challenge.instance, challenge.epoch)
    words = (f"baton {label}", hello.purpose, dialler, acceptor, channel)
    return hmac.digest(record.own.secret, msgspec.msgpack.encode(words), "sha256")


S = HandshakeState
_BAD_MESSAGE: Entry = cell(_give_up, S.ENDED)
_REFUSED: Entry = cell(_heard_refusal, S.ENDED)
_CELLS: Mapping[tuple[Enum, type], Entry] = {
    (S.CALLING, Connected): cell(_begin, S.GREETING),
    (S.GREETING, Challenge): cell(_prove, S.PROVING, S.ENDED),
    (S.PROVING, Accepted): cell(_secure, S.INTRODUCING, S.ENDED),
    (S.LISTENING, Hello): cell(_challenge, S.CHALLENGING, S.ENDED),
    (S.CHALLENGING, Proof): cell(_accept, S.INTRODUCING, S.ENDED),
    (S.INTRODUCING, Introduction): cell(_establish, S.STANDING, S.ENDED),
    # A peer may refuse once it has heard something, and also after this end is content.
    (S.GREETING, Refused): _REFUSED,
    (S.PROVING, Refused): _REFUSED,
    (S.CHALLENGING, Refused): _REFUSED,
    (S.INTRODUCING, Refused): _REFUSED,
    (S.STANDING, Refused): _REFUSED,
    **{(state, Ticked): cell(_time_out, state, S.ENDED) for state in S if state not in (S.STANDING, S.ENDED)},
    (S.STANDING, Ticked): IGNORED,
    (S.ENDED, Ticked): IGNORED,
    **{(state, BadMessage): _BAD_MESSAGE for state in S if state is not S.ENDED},
    # What was under way when this end hung up.
    **{
        (S.ENDED, late): IGNORED
        for late in (Hello, Challenge, Proof, Accepted, Refused, Introduction, BadMessage)
    },
}

HANDSHAKE: Table[Handshake] = Table(
    name="handshake",
    states=HandshakeState,
    remote=frozenset({Hello, Challenge, Proof, Accepted, Introduction, Refused}),
    cells=_CELLS,
)
