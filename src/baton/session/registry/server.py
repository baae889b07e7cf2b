"""The registry over HTTP: an object that runs in any asyncio loop, on its own or inside an instance."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from baton.errors import BatonError, ConfigError
from baton.session.registry.messages import (
    BEAT_S,
    BODY_BYTES_MAX,
    BOOT_HEADER,
    WINDOW_S,
    Change,
    Health,
    Problem,
    Refusal,
    Registered,
    RegistryError,
    Removed,
    Topology,
    Verifier,
    check_instance,
    read_member,
    read_number,
)
from baton.session.registry.state import RegistryState
from baton.settings import LOOPBACK, REGISTRY_PORT

HOST, PORT = LOOPBACK, REGISTRY_PORT
SERVER = "baton"
IDLE_S_MAX = 20.0
"""For a connection without a whole request, half a head included."""
SHUTDOWN_S = 2.0
BEAT = b": beat\n\n"
NUM_WATCHERS_MAX = 1024

STATUSES = {
    Refusal.INVALID: 400,
    Refusal.UNAUTHENTICATED: 401,
    Refusal.UNKNOWN: 404,
    Refusal.TOO_SLOW: 408,
    Refusal.DISPLACED: 409,
    Refusal.CONFLICT: 409,
    Refusal.TOO_LARGE: 413,
    Refusal.FULL: 429,
    Refusal.INCOMPLETE: 503,
}

_aiohttp_log = logging.getLogger("baton.session.registry.aiohttp")


def _without_traceback(record: logging.LogRecord) -> bool:
    """aiohttp's parser errors quote what strangers send: log only that they happened."""
    record.exc_info = None
    return True


_aiohttp_log.addFilter(_without_traceback)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """What is seldom changed."""

    beat_s: float = BEAT_S
    window_s: float = WINDOW_S
    body_s_max: float = 10.0
    num_waiting_max: int = 1024
    """Events that wait for one watcher before it is dropped."""


def encode(event: Topology | Change) -> bytes:
    """One event; JSON has no line feeds of its own, so the data is one line."""
    name = "topology" if isinstance(event, Topology) else "change"
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event.id.encode(),
        name.encode(),
        msgspec.json.encode(event),
    )


class Watch:
    """One open watch: events wait here until its connection takes them."""

    def __init__(self, num_waiting_max: int) -> None:
        self._waiting: deque[bytes] = deque()
        self._num_waiting_max = num_waiting_max
        self._woken = asyncio.Event()
        self.is_over = False

    def put(self, event: bytes) -> bool:
        """Queues an event; false where the reader is too slow for it."""
        if len(self._waiting) >= self._num_waiting_max:
            return False
        self._waiting.append(event)
        self._woken.set()
        return True

    def end(self) -> None:
        """Nothing more is coming."""
        self.is_over = True
        self._woken.set()

    async def take(self, beat_s: float) -> bytes:
        """All that is waiting, or after a while a sign of life."""
        try:
            async with asyncio.timeout(beat_s):
                await self._woken.wait()
        except TimeoutError:
            return BEAT
        self._woken.clear()
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class Watchers:
    """All open watches of a registry."""

    def __init__(self, num_waiting_max: int, beat_s: float) -> None:
        self._num_waiting_max = num_waiting_max
        self._beat_s = beat_s
        self._open: dict[Watch, web.Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def publish(self, events: Iterable[bytes]) -> None:
        """Queues events for everybody."""
        for event in events:
            slow = [watcher for watcher in self._open if not watcher.put(event)]
            for watcher in slow:
                self._drop(watcher)

    def end(self) -> None:
        """Ends all watches."""
        for watcher in self._open:
            watcher.end()

    async def serve(self, request: web.Request, response: web.StreamResponse, first: bytes) -> None:
        """Writes the first event, then all that are published after this call, until the reader leaves."""
        if len(self._open) >= NUM_WATCHERS_MAX:
            raise RegistryError(
                Refusal.FULL, f"{NUM_WATCHERS_MAX} watches are open, the most there can be; close one"
            )
        watcher = Watch(self._num_waiting_max)
        watcher.put(first)
        self._open[watcher] = request
        try:
            await response.prepare(request)
            while not watcher.is_over:
                await response.write(await watcher.take(self._beat_s))
        except ConnectionError:
            pass  # the reader left, or was dropped
        finally:
            self._open.pop(watcher, None)

    def _drop(self, watcher: Watch) -> None:
        request = self._open.pop(watcher)
        watcher.end()
        if request.transport is not None:
            request.transport.abort()


class RegistryServer:
    """A registry; state is in memory alone, and members bring it back after a restart."""

    def __init__(
        self,
        secret: bytes | None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        config: RegistryConfig | None = None,
    ) -> None:
        if secret == b"":
            raise ConfigError("the registry's secret is empty; give one, or None on loopback")
        self._secret = secret
        self._ssl = ssl_context
        self._config = config or RegistryConfig()
        self._boot = secrets.token_hex(8)
        self._state = RegistryState(self._boot)
        self._watchers = Watchers(self._config.num_waiting_max, self._config.beat_s)
        self._verifier: Verifier | None = None
        self._runner: web.AppRunner | None = None
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        assert self._address, "the registry has not been started"
        return self._address

    @property
    def url(self) -> str:
        """What a client is given."""
        return f"{'http' if self._ssl is None else 'https'}://{self.address}"

    async def start(self, host: str = HOST, port: int = PORT) -> None:
        """Listens; port 0 takes a free one. Anywhere but on loopback a secret is needed."""
        assert self._runner is None, "the registry was started before"
        await self._check_host(host)
        if self._secret is not None:
            self._verifier = Verifier(self._secret, time.time(), self._config.window_s)
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._edge])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,  # the signature is of the bytes that were sent
            handler_cancellation=True,
            keepalive_timeout=IDLE_S_MAX,
            logger=_aiohttp_log,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._ssl).start()
        except (OSError, OverflowError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise BatonError(
                f"cannot listen on {host}:{port}: {reason}; name another port, or 0 for a free one"
            ) from None
        host, port = self._runner.addresses[0][:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Ends all watches, stops listening and forgets everything."""
        self._watchers.end()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._timer is not None:
            self._timer.cancel()

    async def _check_host(self, host: str) -> None:
        try:
            places = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"host {host!r} has no address: {error}; use 127.0.0.1 or an address here"
            ) from None
        addresses = {str(place[4][0]).partition("%")[0] for place in places}
        outside = sorted(text for text in addresses if not ipaddress.ip_address(text).is_loopback)
        if outside and self._secret is None:
            raise ConfigError(
                f"host {host!r} ({', '.join(outside)}) can be reached from outside and there is no secret; "
                f"give a secret, or listen on {HOST}"
            )

    def _routes(self) -> list[web.RouteDef]:
        # Spelt out because the default of a part takes no braces.
        member = "/v1/members/{instance:[^/]+}/{rank:[^/]+}"
        return [
            web.put(member, self._register),
            web.delete(member, self._unregister),
            web.get("/v1/topology", self._topology, allow_head=False),
            web.get("/v1/watch", self._watch, allow_head=False),
            web.get("/health", self._health),
        ]

    @web.middleware
    async def _edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request: authenticated before anything of it is looked at, and every refusal a Problem."""
        if request.path == "/health":
            return await handler(request)
        try:
            await self._authenticate(request)
            response = await handler(request)
        except RegistryError as error:
            return self._problem(error)
        except web.HTTPRequestEntityTooLarge:
            return self._problem(
                RegistryError(Refusal.TOO_LARGE, f"the body is longer than {BODY_BYTES_MAX} bytes; send less")
            )
        except web.HTTPException as error:
            paths = "/v1/members, /v1/topology, /v1/watch or /health"
            text = f"{request.method} {request.path!r}: {error.reason}; use {paths}"
            return _json(Problem(Refusal.UNKNOWN, text), error.status)
        finally:
            self._settle()
        return response

    async def _authenticate(self, request: web.Request) -> None:
        try:
            async with asyncio.timeout(self._config.body_s_max):
                body = await request.read()
        except TimeoutError:
            raise RegistryError(
                Refusal.TOO_SLOW,
                f"the body did not come within {self._config.body_s_max:g} s; send it at once",
            ) from None
        if self._verifier is None:
            return
        sent = (request.method, request.raw_path, body)
        reason = self._verifier.refusal(sent, request.headers.get("Authorization"), time.time())
        if reason is not None:
            raise RegistryError(Refusal.UNAUTHENTICATED, reason)

    def _problem(self, error: RegistryError) -> web.Response:
        response = _json(Problem(error.refusal, str(error)), STATUSES[error.refusal])
        match error.refusal:
            case Refusal.UNAUTHENTICATED:
                response.headers["WWW-Authenticate"] = "Baton"
            case Refusal.TOO_SLOW | Refusal.TOO_LARGE:
                response.force_close()
            case _:
                response.headers[BOOT_HEADER] = self._boot
        return response

    def _answer(self, value: msgspec.Struct, status: int = 200) -> web.Response:
        response = _json(value, status)
        response.headers[BOOT_HEADER] = self._boot
        return response

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _settle(self) -> None:
        """Tells the watchers what changed, and sets the timer for what will expire next."""
        changes = self._state.take_changes()
        if changes and len(self._watchers):
            self._watchers.publish([encode(change) for change in changes])
        due = self._state.next_expiry()
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._state.expire(self._now())
        self._settle()

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return _json(Health(), 200)

    async def _register(self, request: web.Request) -> web.Response:
        path = request.match_info
        rank = read_number("rank", path["rank"])
        member = read_member(await request.read(), instance=path["instance"], rank=rank)
        return self._answer(Registered(self._state.register(member, self._now())))

    async def _unregister(self, request: web.Request) -> web.Response:
        path = request.match_info
        rank, epoch = read_number("rank", path["rank"]), read_number("epoch", request.query.get("epoch"))
        return self._answer(Removed(self._state.unregister(path["instance"], rank, epoch, self._now())))

    async def _topology(self, request: web.Request) -> web.Response:
        names = request.query.getall("instance", None)
        for name in names or ():
            check_instance(name)
        topology = self._state.topology(self._now(), names)
        return self._answer(topology, 200 if topology.is_complete else STATUSES[Refusal.INCOMPLETE])

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "Server": SERVER,
                BOOT_HEADER: self._boot,
            }
        )
        topology = self._state.topology(self._now())
        self._settle()  # what this look let expire is news to the others; the topology is without it already
        await self._watchers.serve(request, response, encode(topology))
        return response


def _json(value: msgspec.Struct, status: int) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": SERVER}
    return web.Response(body=msgspec.json.encode(value), status=status, headers=headers)
