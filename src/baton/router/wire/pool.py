"""Connections to instances, kept for the next request."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import msgspec

from baton.errors import ConfigError
from baton.router.wire.leg import Leg, Lost

NUM_IDLE_MAX = 512
IDLE_S_MAX = 30.0
"""Below what any server keeps a silent connection for, so that none is used in the moment it is closed."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instance listens."""

    host: str
    port: int

    @property
    def name(self) -> str:
        """As a Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Call(msgspec.Struct, frozen=True):
    """A request to an instance: the path with its query, and a JSON body unless it is a GET."""

    path: str
    body: bytes | None = None
    keep_bytes_max: int | None = None


def read_origin(url: str) -> Origin:
    """The origin of an instance's URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http" or parts.path.strip("/"):
        raise ConfigError(f"instance URL {url!r} cannot be used; it has to be http://host:port")
    return Origin(host, port)


class Connection(asyncio.Protocol):
    """A socket that carries one leg at a time."""

    def __init__(self, idle: deque[Connection]) -> None:
        self.leg: Leg | None = None
        self.idle_s = 0.0
        self.is_open = True
        self._idle = idle
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other loops have classes of their own

    def data_received(self, data: bytes) -> None:
        if self.leg is not None:
            self.leg.feed(data)
        else:
            self.cut()  # an answer to nothing

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.closed(f"the connection was lost: {error}" if error else "")
        elif self in self._idle:
            self._idle.remove(self)

    def begin(self, request: bytes, leg: Leg) -> None:
        """Sends a request whose answer the leg is fed with."""
        assert self._transport is not None
        self.leg = leg
        self._transport.write(request)

    def pause(self) -> None:
        """Reads no more for now."""
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads on."""
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def finish(self, *, can_be_kept: bool) -> None:
        """The leg is over; the connection waits for the next one, or is cut."""
        self.leg = None
        if can_be_kept and self.is_open and len(self._idle) < NUM_IDLE_MAX:
            self.idle_s = monotonic()
            self._idle.append(self)
        else:
            self.cut()

    def cut(self) -> None:
        """Ends the connection without waiting for what was written."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """All connections of a router, each used by one leg at a time, the last used one first."""

    def __init__(self, key: str | None, connect_s_max: float) -> None:
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._connect_s_max = connect_s_max
        self._idle: dict[Origin, deque[Connection]] = {}
        self._heads: dict[tuple[Origin, str, bool], bytes] = {}

    async def send(self, origin: Origin, call: Call) -> Leg:
        """Sends a request; raises Lost where nobody listens."""
        connection = self._kept(origin) or await self._dialled(origin)
        leg = Leg(connection, call.keep_bytes_max)
        connection.begin(self._request(origin, call), leg)
        return leg

    async def fetch(self, origin: Origin, call: Call, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a small answer; raises Lost where none comes in time."""
        leg = None
        try:
            async with asyncio.timeout(timeout_s):
                leg = await self.send(origin, call)
                head = await leg.answered()
                return head.status, await leg.whole()
        except TimeoutError:
            raise Lost(f"no answer to {call.path} within {timeout_s:g} s", "DEADLINE") from None
        finally:
            if leg is not None:
                leg.close()

    def forget(self, origin: Origin) -> None:
        """Closes what is kept of an instance that has gone."""
        for connection in list(self._idle.pop(origin, ())):
            connection.cut()
        for known in [each for each in self._heads if each[0] == origin]:
            del self._heads[known]

    def close(self) -> None:
        """Closes all that is kept; legs under way are for their owners to close."""
        for origin in list(self._idle):
            self.forget(origin)

    def _kept(self, origin: Origin) -> Connection | None:
        idle = self._idle.setdefault(origin, deque())
        oldest_s = monotonic() - IDLE_S_MAX
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_s >= oldest_s:
                return connection
            connection.cut()
        return None

    async def _dialled(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(origin, deque())
        try:
            async with asyncio.timeout(self._connect_s_max):
                _, connection = await loop.create_connection(
                    lambda: Connection(idle), origin.host, origin.port
                )
        except TimeoutError:
            raise Lost(f"{origin.name} did not accept a connection in time") from None
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise Lost(f"{origin.name} cannot be reached: {reason}", "REFUSED") from None
        return connection

    def _request(self, origin: Origin, call: Call) -> bytes:
        has_body = call.body is not None
        head = self._heads.get((origin, call.path, has_body))
        if head is None:
            head = self._head(origin, call.path, has_body)
            if len(self._heads) < 1024:
                self._heads[origin, call.path, has_body] = head
        if call.body is None:
            return head
        return b"%s%d\r\n\r\n%s" % (head, len(call.body), call.body)

    def _head(self, origin: Origin, path: str, has_body: bool) -> bytes:
        method = "POST" if has_body else "GET"
        text = f"{method} {path} HTTP/1.1\r\nHost: {origin.name}\r\n{self._authorization}"
        tail = "Content-Type: application/json\r\nContent-Length: " if has_body else "\r\n"
        return (text + tail).encode("latin-1")
