"""One control link, without its socket: bytes in, what happened out.

The production loop feeds it from a socket, the simulator from its network. A peer that misbehaves ends its
link and is told why; nothing it sends raises here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.messages import AnyMessage, Introduction
from baton.protocol.outcomes import Cause, Why
from baton.protocol.peer import (
    PEER,
    Begun,
    End,
    Establish,
    Misread,
    Peer,
    PeerState,
    Secure,
    Send,
    TimePassed,
)
from baton.protocol.wire import FRAME_BYTES_MAX, Bare, Codec, Frames, Seal, decode, encode, frame


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake held and the peer introduced itself."""

    introduction: Introduction
    channel: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The link is over: either end refused the other."""

    cause: Cause


Happening: TypeAlias = AnyMessage | Established | Ended


def seal(secure: Secure) -> Codec:
    """The codec of a real link; a simulated one takes `Plain` in its place."""
    return Seal(secure.key, is_dialler=secure.is_dialler)


class Link:
    """Either end of a link, from its first byte on."""

    def __init__(self, peer: Peer, codec_of: Callable[[Secure], Codec] = seal) -> None:
        self.peer = peer
        self._codec_of = codec_of
        self._codec: Codec = Bare()
        self._frames = Frames()
        self._replies: list[bytes] = []
        self.is_standing = False
        """Whether messages can be sent."""
        self.is_ended = False

    @property
    def purpose(self) -> str:
        """What the dialler called for; empty before its hello."""
        return self.peer.hello.purpose if self.peer.hello else ""

    def begin(self, now: float) -> bytes:
        """At the dialler: what to send first."""
        self._step(Begun(), now, [])
        return self.replies()

    def receive(self, data: bytes | memoryview, now: float) -> list[Happening]:
        """What the bytes that came amount to; `replies` has what is to be sent in answer."""
        happened: list[Happening] = []
        self._frames.add(data)
        try:
            while not self.is_ended and (payload := self._frames.take()) is not None:
                self._read(payload, now, happened)
        except RemoteProtocolError as error:
            self._step(Misread(self._blame(), str(error)), now, happened)
        return happened

    def expire(self, now: float) -> list[Happening]:
        """What the time that passed amounts to; means something until the link stands."""
        happened: list[Happening] = []
        self._step(TimePassed(), now, happened)
        return happened

    def refuse(self, text: str, now: float) -> list[Happening]:
        """Ends the link because of what the peer sent; it is told why."""
        happened: list[Happening] = []
        self._step(Misread(self._blame(), text), now, happened)
        return happened

    def send(self, message: AnyMessage) -> bytes:
        """A message as the peer will understand it; they have to be sent in this order."""
        if not self.is_standing:
            state = self.peer.state.value
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is {state}; wait until it stands"
            )
        return self._framed(message)

    def replies(self) -> bytes:
        """What the handshake wants sent, each byte once."""
        data, self._replies = self._replies, []
        return b"".join(data)

    def _framed(self, message: AnyMessage) -> bytes:
        return frame(self._codec.wrap(encode(message)))

    def _read(self, payload: bytes, now: float, happened: list[Happening]) -> None:
        why = Why.REFUSED_AUTHENTICATION
        try:
            body = self._codec.unwrap(payload)
            why = self._blame()
            message = decode(body)
            if type(message) in PEER.remote:
                self._step(message, now, happened)
            elif self.is_standing:
                happened.append(message)
            else:
                name = type(message).__name__
                raise RemoteProtocolError(f"{name} has no place while {self.peer.state.value}")
        except RemoteProtocolError as error:
            self._step(Misread(why, str(error)), now, happened)

    def _blame(self) -> Why:
        """Who is unknown is a stranger; who is known speaks another version."""
        return Why.REFUSED_AUTHENTICATION if isinstance(self._codec, Bare) else Why.REFUSED_VERSION

    def _step(self, event: object, now: float, happened: list[Happening]) -> None:
        self.peer, effects = PEER.step(self.peer, event, now)
        self.is_standing = self.peer.state is PeerState.STANDING
        self.is_ended = self.peer.state is PeerState.ENDED
        for effect in effects:
            match effect:
                case Send(message):
                    self._replies.append(self._framed(message))
                case Secure():
                    self._codec = self._codec_of(effect)
                    self._frames.bytes_max = FRAME_BYTES_MAX
                case Establish(introduction, channel):
                    happened.append(Established(introduction, channel))
                case End(cause):
                    happened.append(Ended(cause))
