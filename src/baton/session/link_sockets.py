"""Sockets under links: listening, dialling, reading and writing.

A socket that closes with unread bytes in it resets the connection and may take its own last words with it.
So an end that is done closes its own direction, reads on for a moment without listening, and then closes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from baton.errors import ConfigError, LocalProtocolError
from baton.protocol.messages import AnyMessage
from baton.protocol.outcomes import Cause
from baton.session.link_turns import Turns
from baton.session.links import Ended, Established, Happening, Link
from baton.settings import Tls

HANDSHAKES_MAX = 128
"""Connections that have not proven themselves; those beyond are turned away."""
LINGER_S = 1.0
UNREAD_BYTES_MAX = 256 << 20
"""What is kept for a peer that does not read; then its link is lost."""
READ_BYTES = 256 << 10
CAUSE_LENGTH_MAX = 400

logger = logging.getLogger("baton.session")


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
        """Refuses what cannot be listened on."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port}: use 0 to 65535")
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host '{self.host}': give the address that peers reach this machine by")


class Owner(Protocol):
    """Whose links these are."""

    def shake_hands(self, wanted: str | None, deadline: float) -> Link:
        """A new link: to dial the wanted instance, or to accept if that is None."""

    def established(self, link: SocketLink, what: Established) -> None:
        """The link stands."""

    def arrived(self, link: SocketLink, message: AnyMessage) -> None:
        """A message came."""

    def over(self, link: SocketLink, cause: Cause) -> None:
        """The link is gone."""

    def lost_peer(self, text: str) -> Cause:
        """That a peer is gone, as this end says it."""


class SocketLink(asyncio.BufferedProtocol):
    """One link and its socket; `number` is -1 until its owner has one for it, `wanted` is the dialler's."""

    def __init__(self, owner: Owner, sockets: Sockets, number: int = -1, wanted: str | None = None) -> None:
        self.owner = owner
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
        _hurry(transport)
        deadline = sockets.now() + sockets.config.handshake_s
        self._timer = sockets.turns.clock.call_at(deadline, self._expire)
        self._link = self.owner.shake_hands(self.wanted, deadline)
        if self.wanted is not None:
            transport.write(self._link.begin(sockets.now()))
        if self._early:
            self._tell(self._link.receive(bytes(self._early), sockets.now()))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where bytes are read to; all links share it, since each empties it at once."""
        return self._sockets.inbox

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        data = self._sockets.inbox[:nbytes]
        if self._link is None:
            self._early += data
        elif not self._is_closing:
            self._tell(self._link.receive(data, self._sockets.now()))

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
            self._report(self.owner.lost_peer(text))

    def send(self, message: AnyMessage) -> None:
        """Queues a message until the turn is over."""
        if self._is_closing or (self._link is not None and self._link.is_ended):
            return
        if self._link is None:
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is not there; wait for `linked`"
            )
        self._unsent.append(self._link.send(message))
        self._sockets.turns.keep(self)

    def flush(self) -> None:
        """Sends what is queued."""
        if self._socket is None or not self._unsent:
            return
        self._socket.write(b"".join(self._unsent))
        self._unsent.clear()
        if self._socket.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.abort(f"the peer left {UNREAD_BYTES_MAX} bytes unread")

    def refuse(self, text: str) -> None:
        """Ends the link because of what the peer sent; it is told why."""
        if self._link is not None and not self._is_closing:
            self._tell(self._link.refuse(text, self._sockets.now()))

    def hang_up(self) -> None:
        """Sends what is queued, then closes; the owner hears no more of it."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.task is not None:
            self.task.cancel()
        if self._socket is not None:
            self.flush()
            self._close(self._socket)

    def abort(self, text: str) -> None:
        """Closes without a word."""
        if not self._is_closing:
            self._is_closing = True
            self._report(self.owner.lost_peer(text))
        if self._socket is not None:
            self._socket.abort()

    def _tell(self, happened: list[Happening]) -> None:
        assert self._link is not None
        if replies := self._link.replies():
            self._unsent.append(replies)
            self._sockets.turns.keep(self)
        for what in happened:
            match what:
                case Established():
                    if self._timer is not None:
                        self._timer.cancel()
                    self._sockets.trust(self)
                    self.owner.established(self, what)
                case Ended(cause):
                    self._report(_printable(cause))
                    self.hang_up()
                case message:
                    self.owner.arrived(self, message)

    def _report(self, cause: Cause) -> None:
        if self.number < 0:
            logger.warning("no link with %s: %s", self._peer_name(), cause)
        self.owner.over(self, cause)

    def _peer_name(self) -> str:
        name = self._socket.get_extra_info("peername") if self._socket is not None else None
        return f"{name[0]}:{name[1]}" if name else "a peer that is gone"

    def _expire(self) -> None:
        if self._link is not None and not self._is_closing:
            self._tell(self._link.expire(self._sockets.now()))

    def _close(self, connection: asyncio.Transport) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._sockets.turns.clock.call_later(LINGER_S, connection.abort)
        if connection.can_write_eof() and not connection.is_closing():
            connection.write_eof()
        else:
            connection.close()


class Doorway(asyncio.Protocol):
    """A connection that came and has no TLS yet; it holds the bare socket, so that closing finds it."""

    def __init__(self, sockets: Sockets, link: SocketLink) -> None:
        self._sockets = sockets
        self._link = link
        self.connection: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Agrees on TLS beside the other connections."""
        assert isinstance(transport, asyncio.Transport)
        # Or its first bytes might come here, before TLS is in between.
        transport.pause_reading()
        self.connection = transport
        self._sockets.doorways.add(self)
        if len(self._sockets.doorways) > HANDSHAKES_MAX:
            transport.abort()
            return
        self._sockets.turns.spawn(self._agree(transport), self._agreed)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone before TLS began."""
        self._sockets.doorways.discard(self)

    async def _agree(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        sockets = self._sockets
        assert sockets.contexts is not None
        return await sockets.turns.clock.start_tls(
            transport,
            self._link,
            sockets.contexts[0],
            server_side=True,
            ssl_handshake_timeout=sockets.config.handshake_s,
            ssl_shutdown_timeout=LINGER_S,
        )

    def _agreed(self, task: asyncio.Task[asyncio.Transport | None]) -> None:
        self._sockets.doorways.discard(self)
        error = task.exception()
        if isinstance(error, OSError):
            logger.warning("no link with a peer that failed TLS: %s", error)
        elif (secured := task.result()) is not None:
            self._link.connection_made(secured)


class Sockets:
    """All sockets of one loop."""

    def __init__(self, config: SocketConfig, turns: Turns) -> None:
        self.config = config
        self.turns = turns
        self.inbox = memoryview(bytearray(READ_BYTES))
        self.contexts = (config.tls.accepting(), config.tls.dialling()) if config.tls else None
        self.address = ""
        """Where it listens, host:port."""
        self.doorways: set[Doorway] = set()
        self._links: set[SocketLink] = set()
        self._strangers: set[SocketLink] = set()
        self._server: asyncio.Server | None = None
        self._forgotten = asyncio.Event()

    def now(self) -> float:
        """The loop's clock."""
        return self.turns.clock.time()

    async def listen(self, owner: Owner) -> None:
        """Accepts links for an owner."""
        config = self.config

        def meet() -> SocketLink | Doorway:
            link = SocketLink(owner, self)
            return Doorway(self, link) if self.contexts else link

        try:
            self._server = await self.turns.clock.create_server(meet, config.host, config.port, backlog=128)
        except OSError as cause:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}: {cause.strerror}; "
                "choose another port, or an address of this machine"
            ) from None
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"

    def dial(self, link: SocketLink, address: str) -> None:
        """Connects a link; its owner hears how that went."""
        link.task = self.turns.spawn(self._connect(link, address), partial(_connected, link, address))

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
            self._server.close()
            await self._server.wait_closed()
        for doorway in self.doorways:
            if doorway.connection is not None:
                doorway.connection.abort()
        await self.turns.cancel_tasks()
        while self._links:
            for link in list(self._links):
                link.hang_up()
            self._forgotten.clear()
            await self._forgotten.wait()

    async def _connect(self, link: SocketLink, address: str) -> None:
        host, port = split_address(address)
        context = self.contexts[1] if self.contexts else None
        async with asyncio.timeout(self.config.connect_s):
            await self.turns.clock.create_connection(
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


def _hurry(connection: asyncio.Transport) -> None:
    """Sends small messages at once."""
    connection.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _printable(cause: Cause) -> Cause:
    """What a peer may have said, fit for a log."""
    instance, text = (
        "".join(letter if letter.isprintable() else "?" for letter in said[:CAUSE_LENGTH_MAX])
        for said in (cause.instance, cause.text)
    )
    return msgspec.structs.replace(cause, instance=instance, text=text)
