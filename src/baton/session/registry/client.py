"""A client of the registry: keeps members registered, looks instances up, watches."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from baton.session.registry.messages import (
    BEAT_S,
    BOOT_HEADER,
    Change,
    Member,
    Problem,
    Refusal,
    Registered,
    RegistryError,
    Removed,
    Topology,
    check_instance,
    check_member,
    sign,
)
from baton.settings import check_registry

CALL_S_MAX = 5.0
CLOSE_S_MAX = 2.0
RETRY_S_FIRST = 0.1
RETRY_S_MAX = 5.0
SILENCE_S_MAX = 3 * BEAT_S
EVENT_BYTES_MAX = 16 << 20
NUM_LISTED_MAX = 8
"""Missing ranks that an error names."""

_EVENTS: dict[str, type[Topology | Change]] = {"topology": Topology, "change": Change}

log = logging.getLogger(__name__)

Value = TypeVar("Value", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RegistryCall:
    """One request; the target is path and query as they stand in the request line."""

    method: str
    target: str
    body: bytes = b""
    call_s_max: float = CALL_S_MAX


class RegistryConnection:
    """Calls to a registry; `on_restart` is called when another run of it answers than before."""

    def __init__(
        self,
        url: str,
        secret: bytes | None,
        ssl_context: ssl.SSLContext | None,
        on_restart: Callable[[], None],
    ) -> None:
        check_registry(url)
        self.url = url.rstrip("/")
        self._secret = secret
        self._ssl = ssl_context
        self._on_restart = on_restart
        self._boot: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def call(self, call: RegistryCall, kind: type[Value]) -> Value:
        """The registry's answer; raises RegistryError when it refuses or cannot be reached."""
        try:
            return await self._call(call, kind)
        except RegistryError as error:
            if error.refusal is not Refusal.UNAUTHENTICATED:
                raise
        # A signature grows old while a connection or a registry is replaced; the second is fresh.
        return await self._call(call, kind)

    async def _call(self, call: RegistryCall, kind: type[Value]) -> Value:
        timeout = aiohttp.ClientTimeout(total=call.call_s_max)
        async with self.opened(call, timeout) as response:
            body = await response.read()
            # An incomplete topology is an answer like any other.
            if response.status == 200 or (response.status == 503 and kind is Topology):
                return self._decoded(body, kind, response.status)
            raise self._refused(body, response.status)

    @asynccontextmanager
    async def opened(
        self, call: RegistryCall, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A signed request under way; what goes wrong on the wire becomes RegistryError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        headers = {"Content-Type": "application/json"} if call.body else {}
        if self._secret is not None:
            sent = (call.method, call.target, call.body)
            headers["Authorization"] = sign(self._secret, sent, time.time(), secrets.token_hex(16))
        url = URL(self.url + call.target, encoded=True)
        try:
            async with self._session.request(
                call.method,
                url,
                data=call.body or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=True if self._ssl is None else self._ssl,
            ) as response:
                self._notice(response.headers.get(BOOT_HEADER))
                yield response
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            text = str(error) or type(error).__name__
            raise RegistryError(
                Refusal.UNREACHABLE, f"registry {self.url} does not answer: {text}; see that it runs"
            ) from error

    async def read_problem(self, response: aiohttp.ClientResponse) -> RegistryError:
        """Why the registry did not open what was asked for."""
        return self._refused(await response.read(), response.status)

    async def close(self) -> None:
        """Ends all calls."""
        if self._session is not None:
            await self._session.close()

    def _notice(self, boot: str | None) -> None:
        if boot is None or boot == self._boot:
            return
        is_restart, self._boot = self._boot is not None, boot
        if is_restart:
            self._on_restart()

    def _refused(self, body: bytes, status: int) -> RegistryError:
        try:
            problem = self._decoded(body, Problem, status)
        except RegistryError as error:
            return error
        return RegistryError(problem.refusal, problem.error)

    def _decoded(self, body: bytes, kind: type[Value], status: int) -> Value:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RegistryError(
                Refusal.UNREACHABLE,
                f"{self.url} answers with status {status} and {body[:60]!r}, which no registry says; "
                f"look for a proxy, or another program on that port",
            ) from None


class Backoff:
    """Waits that double up to a most, each cut by chance so that many callers do not come back together."""

    def __init__(self, first_s: float, most_s: float, chance: Callable[[], float] = random.random) -> None:
        self._first_s = min(first_s, most_s)
        self._most_s = most_s
        self._chance = chance
        self._next_s = self._first_s

    def next(self) -> float:
        """The next wait: between half of it and the whole."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._most_s)
        return wait_s * (1 + self._chance()) / 2

    def reset(self) -> None:
        """It worked: after the next failure the first wait comes again."""
        self._next_s = self._first_s


class EventReader:
    """Events from bytes as they come; comments, and events of names not known here, are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Topology | Change]:
        """The events that these bytes complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise RegistryError(
                Refusal.UNREACHABLE, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this a registry?"
            )
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
            kind = _EVENTS.get(fields.get(b"event", b"").decode("utf-8", "replace"))
            if kind is not None:
                yield _decode(kind, fields.get(b"data", b""))


def _decode(kind: type[Topology | Change], data: bytes) -> Topology | Change:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(
            Refusal.UNREACHABLE, f"an event cannot be read ({error}); is this a registry?"
        ) from None


class Registration:
    """A member that is being kept registered."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.last_error = ""
        """Why the last try failed; empty when it did not."""
        self._registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The caller need not wait for it: asyncio then does not warn of an exception that was never read.
        self._registered.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._woken = asyncio.Event()

    async def wait(self) -> None:
        """Returns once the member has been registered; raises RegistryError if it never can be."""
        await asyncio.shield(self._registered)

    def succeeded(self) -> None:
        """The registry has it."""
        self.last_error = ""
        if not self._registered.done():
            self._registered.set_result(None)

    def failed(self, error: RegistryError, *, is_final: bool) -> None:
        """The registry does not have it, as far as is known."""
        if str(error) != self.last_error:
            log.warning("cannot register rank %d of %s: %s", self.member.rank, self.member.instance, error)
        self.last_error = str(error)
        if is_final and not self._registered.done():
            self._registered.set_exception(error)

    def end(self) -> None:
        """It is not kept any more."""
        if not self._registered.done():
            text = f"the client was closed before the registry had answered; {self.last_error}".rstrip("; ")
            self._registered.set_exception(RegistryError(Refusal.UNREACHABLE, text))

    def wake(self) -> None:
        """Renew now."""
        self._woken.set()

    async def pause(self, wait_s: float) -> None:
        """Until the next renewal."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        self._woken.clear()


class RegistryClient:
    """One process's relationship with a registry, for use in one asyncio loop."""

    def __init__(
        self,
        url: str,
        secret: bytes | None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        on_displaced: Callable[[str], None] | None = None,
    ) -> None:
        self._connection = RegistryConnection(url, secret, ssl_context, self._restarted)
        self._on_displaced = on_displaced
        self._kept: dict[Registration, asyncio.Task[None]] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def register(self, member: Member) -> Registration:
        """Registers a member and keeps it so, whatever becomes of the registry, until `close`."""
        assert not self._is_closed, "register was called after close"
        check_member(member)
        registration = Registration(member)
        self._kept[registration] = _spawn(self._keep(registration))
        return registration

    async def topology(self, instance: str | None = None) -> Topology:
        """Everything, or one instance; look at `is_complete` and `missing`."""
        query = ""
        if instance is not None:
            check_instance(instance)
            query = "?" + urlencode({"instance": instance})
        return await self._connection.call(RegistryCall("GET", f"/v1/topology{query}"), Topology)

    async def coordinator(self, instance: str) -> str:
        """The address of an instance's coordinator, once the instance is complete."""
        topology = await self.topology(instance)
        if not topology.is_complete:
            missing = topology.missing[0]
            ranks = f" (ranks {_listed(missing.ranks)})" if missing.ranks else ""
            raise RegistryError(
                Refusal.INCOMPLETE, f"instance {instance!r} is not complete: {missing.reason}{ranks}"
            )
        for roster in topology.instances:
            if roster.instance == instance:
                return roster.coordinator
        raise RegistryError(
            Refusal.UNREACHABLE, f"{self._connection.url} left out {instance!r}; is it a registry?"
        )

    async def watch(self) -> AsyncIterator[Topology | Change]:
        """The topology, then its changes; after a reconnection a topology again, which replaces the old."""
        backoff, last_error = Backoff(RETRY_S_FIRST, RETRY_S_MAX), ""
        while not self._is_closed:
            try:
                async for event in self._events():
                    backoff.reset()
                    last_error = ""
                    yield event
            except RegistryError as error:
                if str(error) != last_error and not self._is_closed:
                    log.warning("lost the registry's event stream, reconnecting: %s", error)
                last_error = str(error)
            await asyncio.sleep(backoff.next())

    async def close(self) -> None:
        """Unregisters all members, as far as the registry answers, and ends."""
        self._is_closed = True
        members = [registration.member for registration in self._kept]
        for registration in self._kept:
            registration.end()
        tasks = list(self._kept.values())
        self._kept.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await asyncio.gather(*(self._unregister(member) for member in members))
        await self._connection.close()

    async def _unregister(self, member: Member) -> None:
        target = f"{_member_path(member)}?epoch={member.epoch}"
        with suppress(RegistryError):  # without an answer it expires
            await self._connection.call(RegistryCall("DELETE", target, call_s_max=CLOSE_S_MAX), Removed)

    async def _keep(self, registration: Registration) -> None:
        member = registration.member
        period_s = member.ttl_s / 3
        backoff = Backoff(min(RETRY_S_FIRST, period_s), min(RETRY_S_MAX, period_s))
        body = msgspec.json.encode(member)
        call = RegistryCall("PUT", _member_path(member), body, min(CALL_S_MAX, period_s))
        while True:
            try:
                await self._connection.call(call, Registered)
            except RegistryError as error:
                is_displaced = error.refusal is Refusal.DISPLACED
                registration.failed(error, is_final=is_displaced)
                if is_displaced:
                    self._displaced(registration, str(error))
                    return
                wait_s = backoff.next()
            else:
                registration.succeeded()
                backoff.reset()
                wait_s = period_s
            await registration.pause(wait_s)

    def _displaced(self, registration: Registration, reason: str) -> None:
        """The epoch is over: none of its members is kept any more, and the instance is informed once."""
        over = (registration.member.instance, registration.member.epoch)
        for other in [kept for kept in self._kept if (kept.member.instance, kept.member.epoch) == over]:
            task = self._kept.pop(other)
            if other is not registration:
                task.cancel()
                other.failed(RegistryError(Refusal.DISPLACED, reason), is_final=True)
        if self._on_displaced is not None:
            self._on_displaced(reason)

    def _restarted(self) -> None:
        if self._is_closed:
            return
        log.warning("registry %s has restarted; registering again", self._connection.url)
        for registration in self._kept:
            registration.wake()

    async def _events(self) -> AsyncIterator[Topology | Change]:
        reader = EventReader()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S_MAX, sock_read=SILENCE_S_MAX)
        async with self._connection.opened(RegistryCall("GET", "/v1/watch"), timeout) as response:
            if response.status != 200:
                raise await self._connection.read_problem(response)
            async for data in response.content.iter_any():
                for event in reader.feed(data):
                    yield event


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


def _member_path(member: Member) -> str:
    return f"/v1/members/{quote(member.instance, safe='')}/{member.rank}"


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:NUM_LISTED_MAX]))
    return shown if len(ranks) <= NUM_LISTED_MAX else f"{shown} and {len(ranks) - NUM_LISTED_MAX} more"
