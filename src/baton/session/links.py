"""Control links: the protocol of one end (`Link`), and sockets under it.

`Link` has no socket: bytes go in, events come out. The production loop feeds it from a socket, the simulator
from its network. A peer that misbehaves loses its link and gets the reason; nothing it sends raises here.

A socket that closes with unread bytes in it resets the connection, and its own last message may be lost. So
an end that is done closes its own direction, reads on for a moment without processing, and then closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import msgspec

from baton.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from baton.protocol.handshake import (
    HANDSHAKE,
    BadMessage,
    Connected,
    Ended,
    Established,
    Handshake,
    HandshakeState,
    Secure,
)
from baton.protocol.machine import Ticked
from baton.protocol.messages import Introduction, Message
from baton.protocol.outcomes import Cause, Why
from baton.protocol.wire import FRAME_BYTES_MAX, Bare, Codec, Frames, Seal, decode, encode, frame
from baton.session.event_loop import EventLoop
from baton.settings import Tls

HANDSHAKES_MAX = 128
"""Connections that have not proven the secret; further ones are refused."""
LINGER_S = 1.0
UNREAD_BYTES_MAX = 256 << 20
"""What is kept for a peer that does not read; then its link is lost."""
READ_BYTES = 256 << 10
CAUSE_LENGTH_MAX = 400

logger = logging.getLogger("baton.session")

LinkEvent: TypeAlias = Message | Established | Ended


def seal(secure: Secure) -> Codec:
    """The codec of a real link; a simulated one takes `Plain` instead."""
    return Seal(secure.key, is_dialler=secure.is_dialler)


class Link:
    """Either end of a link, from its first byte on."""

    def __init__(self, handshake: Handshake, codec_of: Callable[[Secure], Codec] = seal) -> None:
        self.handshake = handshake
        self._codec_of = codec_of
        self._codec: Codec = Bare()
        self._frames = Frames()
        self._replies: list[bytes] = []
        self.is_standing = False
        """Whether messages can be sent."""
        self.is_ended = False

    def begin(self, now: float) -> bytes:
        """At the dialler: what to send first."""
        self._step(Connected(), now)
        return self.replies()

    def receive(self, data: bytes | memoryview, now: float) -> list[LinkEvent]:
        """The events in these bytes; `replies` has what is to be sent in answer."""
        events: list[LinkEvent] = []
        self._frames.add(data)
        try:
            while not self.is_ended:
                why = self._blame()
                payload = self._frames.take()
                if payload is None:
                    break
                why = Why.REFUSED_AUTHENTICATION
                body = self._codec.unwrap(payload)
                why = self._blame()
                message = decode(body)
                if type(message) in HANDSHAKE.remote:
                    events += self._step(message, now)
                elif self.is_standing:
                    events.append(message)
                else:
                    name, state = type(message).__name__, self.handshake.state.value
                    raise RemoteProtocolError(f"{name} has no place while {state}")
        except RemoteProtocolError as error:
            events += self._step(BadMessage(why, str(error)), now)
        return events

    def expire(self, now: float) -> list[LinkEvent]:
        """Checks the deadline of the handshake."""
        return self._step(Ticked(), now)

    def refuse(self, text: str, now: float) -> list[LinkEvent]:
        """Ends the link because of what the peer sent, and sends the reason."""
        return self._step(BadMessage(self._blame(), text), now)

    def send(self, message: Message) -> bytes:
        """A message as bytes for the peer; they have to be sent in this order."""
        if not self.is_standing:
            state = self.handshake.state.value
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is {state}; wait until it stands"
            )
        return frame(self._codec.wrap(encode(message)))

    def replies(self) -> bytes:
        """What the handshake wants sent, each byte once."""
        data, self._replies = self._replies, []
        return b"".join(data)

    def _blame(self) -> Why:
        """An unknown peer is a stranger; a known one speaks another version."""
        return Why.REFUSED_AUTHENTICATION if isinstance(self._codec, Bare) else Why.REFUSED_VERSION

    def _step(self, event: object, now: float) -> list[LinkEvent]:
        events: list[LinkEvent] = []
        self.handshake, effects = HANDSHAKE.step(self.handshake, event, now)
        self.is_standing = self.handshake.state is HandshakeState.STANDING
        self.is_ended = self.handshake.state is HandshakeState.ENDED
        for effect in effects:
            match effect:
                case Message():
                    self._replies.append(frame(self._codec.wrap(encode(effect))))
                case Secure():
                    self._codec = self._codec_of(effect)
                    self._frames.bytes_max = FRAME_BYTES_MAX
                case Established() | Ended():
                    events.append(effect)
        return events


@dataclass(frozen=True, slots=True)
class SocketConfig:
    """Where an instance listens, how long links may take to come up, and the certificates if there is TLS."""

    host: str = "127.0.0.1"
    """The address of this machine that peers use; it listens on that alone."""
    port: int = 0
    """0 takes any free one."""
    connect_s: float = 2.0
    handshake_s: float = 5.0
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port}: use 0 to 65535")
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host '{self.host}': give the address that peers reach this machine by")


class LinkHandler(Protocol):
    """Receives the events of socket links."""

    def shake_hands(self, wanted: str | None, deadline: float) -> Link:
        """A new link: to dial the wanted instance, or to accept if that is None."""

    def adopt(self, channel: SocketLink) -> int:
        """A number for a link that the other end began."""

    def linked(self, number: int, peer: Introduction, channel: bytes) -> None:
        """The link stands."""

    def on_message(self, number: int, message: Message) -> None:
        """A message came."""

    def on_lost(self, number: int, cause: Cause) -> None:
        """The link is gone."""

    def peer_lost(self, text: str) -> Cause:
        """The cause, at this end, of a lost peer."""


class SocketLink(asyncio.BufferedProtocol):
    """One link and its socket; `number` is -1 until its handler has one for it, `wanted` is the dialler's."""

    def __init__(
        self, handler: LinkHandler, sockets: Sockets, number: int = -1, wanted: str | None = None
    ) -> None:
        self.handler = handler
        self.number = number
        self.wanted = wanted
        self.task: asyncio.Task[None] | None = None
        """Of the dialler, until it is connected."""
        self._sockets = sockets
        self._link: Link | None = None
        self._socket: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._early = bytearray()
        """What came with the end of TLS's own handshake."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there: the handshake begins."""
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        sockets = self._sockets
        if self._is_closing:
            transport.abort()
            return
        if not sockets.admit(self):
            self.abort(f"{HANDSHAKES_MAX} others are at their handshake; try again")
            return
        deadline = sockets.now() + sockets.config.handshake_s
        self._timer = sockets.events.clock.call_at(deadline, self._expire)
        self._link = self.handler.shake_hands(self.wanted, deadline)
        if self.wanted is not None:
            transport.write(self._link.begin(sockets.now()))
        if self._early:
            self._handle(self._link.receive(bytes(self._early), sockets.now()))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where bytes are read to; all links share it, since each empties it at once."""
        return self._sockets.inbox

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        data = self._sockets.inbox[:nbytes]
        if self._link is None:
            self._early += data
        elif not self._is_closing:
            self._handle(self._link.receive(data, self._sockets.now()))

    def eof_received(self) -> None:
        """The peer closed its direction; `connection_lost` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._sockets.forget(self)
        if not self._is_closing:
            self._is_closing = True
            text = f"the connection was lost: {exc}" if exc else "the peer closed the connection"
            self._report(self.handler.peer_lost(text))

    def send(self, message: Message) -> None:
        """Queues a message until the pass is over."""
        if self._is_closing or (self._link is not None and self._link.is_ended):
            return
        if self._link is None:
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is not there; wait for `linked`"
            )
        self._unsent.append(self._link.send(message))
        self._sockets.events.flush_later(self)

    def flush(self) -> None:
        """Sends what is queued."""
        if self._socket is None or not self._unsent:
            return
        self._socket.write(b"".join(self._unsent))
        self._unsent.clear()
        if self._socket.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.abort(f"the peer left {UNREAD_BYTES_MAX} bytes unread")

    def refuse(self, text: str) -> None:
        """Ends the link because of what the peer sent, and sends the reason."""
        if self._link is not None and not self._is_closing:
            self._handle(self._link.refuse(text, self._sockets.now()))

    def hang_up(self) -> None:
        """Sends what is queued, then closes; the handler gets no more events."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.task is not None:
            self.task.cancel()
        if self._socket is None:
            return
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._sockets.events.clock.call_later(LINGER_S, self._socket.abort)
        if not self._socket.can_write_eof() or self._socket.is_closing():
            self._socket.close()
            return
        try:
            self._socket.write_eof()
        except OSError:  # it was reset, and asyncio has not noticed yet
            self._socket.abort()

    def abort(self, text: str) -> None:
        """Closes without telling the peer."""
        if not self._is_closing:
            self._is_closing = True
            self._report(self.handler.peer_lost(text))
        if self._socket is not None:
            self._socket.abort()

    def _handle(self, events: list[LinkEvent]) -> None:
        assert self._link is not None
        if replies := self._link.replies():
            self._unsent.append(replies)
            self._sockets.events.flush_later(self)
        for event in events:
            match event:
                case Established(introduction, channel):
                    if self._timer is not None:
                        self._timer.cancel()
                    self._sockets.trust(self)
                    if self.number < 0:
                        self.number = self.handler.adopt(self)
                    self.handler.linked(self.number, introduction, channel)
                case Ended(cause):
                    self._report(_printable(cause))
                    self.hang_up()
                case message:
                    self.handler.on_message(self.number, message)

    def _report(self, cause: Cause) -> None:
        if self.number < 0:
            name = self._socket.get_extra_info("peername") if self._socket is not None else None
            peer = f"{name[0]}:{name[1]}" if name else "a disconnected peer"
            logger.warning("control link with %s not established: %s", peer, cause)
        self.handler.on_lost(self.number, cause)

    def _expire(self) -> None:
        if self._link is not None and not self._is_closing:
            self._handle(self._link.expire(self._sockets.now()))


class TlsAcceptor(asyncio.Protocol):
    """An accepted connection without TLS yet; it holds the bare socket, so that closing finds it."""

    def __init__(self, sockets: Sockets, link: SocketLink) -> None:
        self._sockets = sockets
        self._link = link
        self.connection: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts TLS beside the other connections."""
        assert isinstance(transport, asyncio.Transport)
        # Or its first bytes might come here, before TLS is in between.
        transport.pause_reading()
        self.connection = transport
        self._sockets.tls_acceptors.add(self)
        if len(self._sockets.tls_acceptors) > HANDSHAKES_MAX:
            transport.abort()
            return
        self._sockets.events.spawn(self._start_tls(transport), self._on_started)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone before TLS began."""
        self._sockets.tls_acceptors.discard(self)

    async def _start_tls(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        sockets = self._sockets
        assert sockets.contexts is not None
        return await sockets.events.clock.start_tls(
            transport,
            self._link,
            sockets.contexts[0],
            server_side=True,
            ssl_handshake_timeout=sockets.config.handshake_s,
            ssl_shutdown_timeout=LINGER_S,
        )

    def _on_started(self, task: asyncio.Task[asyncio.Transport | None]) -> None:
        self._sockets.tls_acceptors.discard(self)
        error = task.exception()
        if isinstance(error, OSError):
            logger.warning("control link not established, TLS failed: %s", error)
        elif (secured := task.result()) is not None:
            self._link.connection_made(secured)


class Sockets:
    """All sockets of one loop."""

    def __init__(self, config: SocketConfig, events: EventLoop) -> None:
        self.config = config
        self.events = events
        self.inbox = memoryview(bytearray(READ_BYTES))
        self.contexts = (config.tls.accepting(), config.tls.dialling()) if config.tls else None
        self.address = ""
        """Where it listens, host:port."""
        self.tls_acceptors: set[TlsAcceptor] = set()
        self._links: set[SocketLink] = set()
        self._strangers: set[SocketLink] = set()
        self._server: asyncio.Server | None = None
        self._forgotten = asyncio.Event()

    def now(self) -> float:
        """The loop's clock."""
        return self.events.clock.time()

    async def listen(self, handler: LinkHandler) -> None:
        """Accepts links for a handler."""
        config = self.config

        def accept() -> SocketLink | TlsAcceptor:
            link = SocketLink(handler, self)
            return TlsAcceptor(self, link) if self.contexts else link

        try:
            self._server = await self.events.clock.create_server(
                accept, config.host, config.port, backlog=128
            )
        except OSError as cause:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}: {cause.strerror}; "
                "choose another port, or an address of this machine"
            ) from None
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"

    def dial(self, link: SocketLink, address: str) -> None:
        """Connects a link; its handler learns how that went."""
        link.task = self.events.spawn(self._connect(link, address), partial(_connected, link, address))

    def admit(self, link: SocketLink) -> bool:
        """Whether one more connection may begin its handshake."""
        self._links.add(link)
        if link.wanted is not None:
            return True
        self._strangers.add(link)
        return len(self._strangers) <= HANDSHAKES_MAX

    def trust(self, link: SocketLink) -> None:
        """The handshake of a link held."""
        self._strangers.discard(link)

    def forget(self, link: SocketLink) -> None:
        """The connection of a link is gone."""
        self._strangers.discard(link)
        self._links.discard(link)
        self._forgotten.set()

    async def close(self) -> None:
        """Sends what is queued and closes everything."""
        if self._server is not None:
            # Without `wait_closed`: from Python 3.12 on it waits for peers, too, until they hang up.
            self._server.close()
        for acceptor in self.tls_acceptors:
            if acceptor.connection is not None:
                acceptor.connection.abort()
        await self.events.cancel_tasks()
        while self._links:
            for link in list(self._links):
                link.hang_up()
            self._forgotten.clear()
            await self._forgotten.wait()

    async def _connect(self, link: SocketLink, address: str) -> None:
        host, port = split_address(address)
        context = self.contexts[1] if self.contexts else None
        async with asyncio.timeout(self.config.connect_s):
            await self.events.clock.create_connection(
                lambda: link,
                host,
                port,
                ssl=context,
                ssl_shutdown_timeout=LINGER_S if context else None,
            )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"not an address, host:port is needed: {address[:80]!a}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _connected(link: SocketLink, address: str, task: asyncio.Task[None]) -> None:
    link.task = None
    error = task.exception()
    if isinstance(error, TimeoutError):
        link.abort(f"cannot reach {address}: no answer in time")
    elif isinstance(error, ConfigError):
        link.abort(str(error))
    elif isinstance(error, OSError | UnicodeError):
        # A host name that cannot be one is a UnicodeError.
        link.abort(f"cannot reach {address}: {error}")
    else:
        task.result()


def _printable(cause: Cause) -> Cause:
    """A cause that a peer may have sent, fit for a log."""
    instance, text = (
        "".join(letter if letter.isprintable() else "?" for letter in value[:CAUSE_LENGTH_MAX])
        for value in (cause.instance, cause.text)
    )
    return msgspec.structs.replace(cause, instance=instance, text=text)
