"""How two ends of a link come to trust each other.

    dialler -> acceptor    hello: versions, a nonce, who it is and for what it calls
    acceptor -> dialler    challenge: the version taken, a nonce, who it is
    dialler -> acceptor    proof: a MAC under the shared secret over all of that, as dialler
    acceptor -> dialler    accepted: a MAC over the same and the channel's id, as acceptor
    both                   introduction, sealed under the session key

The dialler proves itself first: an acceptor computes nothing under the secret for a stranger. Both MACs cover
everything that was said, so that nobody in between can take a version or a name out of it, and each names its
role, so that none serves for the other. The session key comes from the secret and the same words. Nonces and
the channel's id are given to the record, like the secret: nothing here is random.

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

from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace
from baton.protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Accepted,
    AnyMessage,
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


class PeerState(Enum):
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
class Peer:
    """The record of one handshake at one end."""

    state: PeerState
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
class Begun:
    """The dialler's connection is there."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It may be too late."""


@dataclass(frozen=True, slots=True)
class Misread:
    """The peer sent what has no place here, or is no message at all."""

    why: Why
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, under the codec that holds now."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Secure:
    """Everything after this is sealed, both ways."""

    key: bytes = field(repr=False)
    channel: bytes
    is_dialler: bool


@dataclass(frozen=True, slots=True)
class Establish:
    """The link stands."""

    introduction: Introduction
    channel: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The link is over; what was sent before is still to go out."""

    cause: Cause


Step: TypeAlias = tuple[Peer, Effects]


def dialling(own: Party, wanted: str, nonce: bytes, deadline: float) -> Peer:
    """A handshake that this end begins, with the instance it wants to find (empty: whoever is there)."""
    assert len(nonce) == NONCE_BYTES
    return Peer(PeerState.CALLING, own, nonce, deadline, wanted=wanted)


def accepting(own: Party, nonce: bytes, channel: bytes, deadline: float) -> Peer:
    """A handshake that the other end begins, with the id of the channel it may lead to."""
    assert (len(nonce), len(channel)) == (NONCE_BYTES, CHANNEL_BYTES)
    return Peer(PeerState.LISTENING, own, nonce, deadline, channel=channel)


def _begin(one: Peer, event: Begun, now: float) -> Step:
    said = one.own.introduction
    hello = Hello(
        version_min=one.own.versions[0],
        version_max=one.own.versions[1],
        nonce=one.nonce,
        purpose=one.own.dials,
        instance=said.instance,
        epoch=said.epoch,
        rank=said.rank,
    )
    return replace(one, state=PeerState.GREETING, hello=hello), (Send(hello),)


def _challenge(one: Peer, hello: Hello, now: float) -> Step:
    first, last = one.own.versions
    version = min(last, hello.version_max)
    if version < max(first, hello.version_min):
        return _refuse(
            one, Why.REFUSED_VERSION, _apart((first, last), (hello.version_min, hello.version_max))
        )
    if len(hello.nonce) != NONCE_BYTES:
        return _refuse(one, Why.REFUSED_AUTHENTICATION, _wrong_nonce(hello.nonce))
    challenge = Challenge(
        version=version, nonce=one.nonce, instance=one.own.instance, epoch=one.own.introduction.epoch
    )
    return replace(one, state=PeerState.CHALLENGING, hello=hello, challenge=challenge), (Send(challenge),)


def _prove(one: Peer, challenge: Challenge, now: float) -> Step:
    first, last = one.own.versions
    if not first <= challenge.version <= last:
        return _refuse(
            one, Why.REFUSED_VERSION, _apart((first, last), (challenge.version, challenge.version))
        )
    if one.wanted and challenge.instance != one.wanted:
        text = f"instance {one.wanted!a} was wanted here; look its address up again"
        return _refuse(one, Why.REFUSED_AUTHENTICATION, text)
    if len(challenge.nonce) != NONCE_BYTES:
        return _refuse(one, Why.REFUSED_AUTHENTICATION, _wrong_nonce(challenge.nonce))
    after = replace(one, state=PeerState.PROVING, challenge=challenge)
    return after, (Send(Proof(mac=_mac(after, "dialler"))),)


def _accept(one: Peer, proof: Proof, now: float) -> Step:
    if not hmac.compare_digest(proof.mac, _mac(one, "dialler")):
        return _refuse(
            one, Why.REFUSED_AUTHENTICATION, "the proof does not hold; use one secret on both sides"
        )
    if misfit := _misfit(one):
        return _refuse(one, Why.REFUSED_AUTHENTICATION, misfit)
    accepted = Accepted(mac=_mac(one, "acceptor", one.channel), channel=one.channel)
    return replace(one, state=PeerState.INTRODUCING), (Send(accepted), *_sealed(one))


def _misfit(one: Peer) -> str:
    """Why somebody who knows the secret is wrong here all the same; empty if right."""
    assert one.hello is not None
    purpose, rank = one.hello.purpose, one.hello.rank
    if purpose not in one.own.accepts:
        return f"this end takes no links for {purpose[:40]!a}"
    if (rank >= 0) != (purpose == MEMBER):
        return f"rank {rank} cannot have a {purpose} link"
    if purpose == MEMBER and one.hello.instance != one.own.instance:
        return f"a rank of another instance cannot be a member of {one.own.instance}"
    return ""


def _secure(one: Peer, accepted: Accepted, now: float) -> Step:
    is_proven = hmac.compare_digest(accepted.mac, _mac(one, "acceptor", accepted.channel))
    if not is_proven or len(accepted.channel) != CHANNEL_BYTES:
        return _refuse(
            one, Why.REFUSED_AUTHENTICATION, "the proof does not hold; use one secret on both sides"
        )
    after = replace(one, state=PeerState.INTRODUCING, channel=accepted.channel)
    return after, _sealed(after)


def _sealed(one: Peer) -> Effects:
    key = _mac(one, "session key", one.channel)
    return Secure(key, one.channel, one.is_dialler), Send(one.own.introduction)


def _establish(one: Peer, said: Introduction, now: float) -> Step:
    assert one.hello is not None
    assert one.challenge is not None
    hello, challenge = one.hello, one.challenge
    shaken = (hello.instance, hello.epoch, hello.rank)
    if one.is_dialler:
        shaken = (challenge.instance, challenge.epoch, -1)
    if (said.instance, said.epoch, said.rank) != shaken:
        return _refuse(
            one, Why.REFUSED_AUTHENTICATION, "the introduction is not of whom the handshake was with"
        )
    return replace(one, state=PeerState.STANDING), (Establish(said, one.channel),)


def _heard_refusal(one: Peer, refused: Refused, now: float) -> Step:
    return replace(one, state=PeerState.ENDED), (End(refused.cause),)


def _time_out(one: Peer, event: TimePassed, now: float) -> Step:
    if now < one.deadline:
        return one, ()
    return _refuse(one, Why.DEADLINE, f"the handshake was still {one.state.value} when its time was over")


def _give_up(one: Peer, event: Misread, now: float) -> Step:
    return _refuse(one, event.why, event.text)


def _refuse(one: Peer, why: Why, text: str) -> Step:
    said = one.own.introduction
    cause = Cause(why, Stage.HANDSHAKE, instance=said.instance, rank=said.rank, text=text)
    return replace(one, state=PeerState.ENDED), (Send(Refused(cause=cause)), End(cause))


def _apart(ours: Span, theirs: Span) -> str:
    return (
        f"this end speaks versions {ours[0]} to {ours[1]}, the other {theirs[0]} to {theirs[1]}; "
        "upgrade the older"
    )


def _wrong_nonce(nonce: bytes) -> str:
    return f"a nonce of {len(nonce)} bytes; {NONCE_BYTES} are needed"


def _mac(one: Peer, label: str, channel: bytes = b"") -> bytes:
    """A MAC over everything both said, for one use alone."""
    hello, challenge = one.hello, one.challenge
    assert hello is not None
    assert challenge is not None
    dialler = (hello.version_min, hello.version_max, hello.nonce, hello.instance, hello.epoch, hello.rank)
    acceptor = (challenge.version, challenge.nonce, challenge.instance, challenge.epoch)
    words = (f"baton {label}", hello.purpose, dialler, acceptor, channel)
    return hmac.digest(one.own.secret, msgspec.msgpack.encode(words), "sha256")


S = PeerState
_MISREAD: Entry = cell(_give_up, S.ENDED)
_REFUSED: Entry = cell(_heard_refusal, S.ENDED)
_CELLS: Mapping[tuple[Enum, type], Entry] = {
    (S.CALLING, Begun): cell(_begin, S.GREETING),
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
    **{
        (state, TimePassed): cell(_time_out, state, S.ENDED)
        for state in S
        if state not in (S.STANDING, S.ENDED)
    },
    (S.STANDING, TimePassed): IGNORED,
    (S.ENDED, TimePassed): IGNORED,
    **{(state, Misread): _MISREAD for state in S if state is not S.ENDED},
    # What was under way when this end hung up.
    **{
        (S.ENDED, late): IGNORED
        for late in (Hello, Challenge, Proof, Accepted, Refused, Introduction, Misread)
    },
}

PEER: Table[Peer] = Table(
    name="peer",
    states=PeerState,
    events=(Begun, Hello, Challenge, Proof, Accepted, Introduction, Refused, TimePassed, Misread),
    remote=frozenset({Hello, Challenge, Proof, Accepted, Introduction, Refused}),
    cells=_CELLS,
)
