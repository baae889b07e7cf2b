"""The instances that a router knows: their rosters, their health, and the load they were given.

The registry lists the instances, and they are kept while it does not answer. An instance that it no longer
lists, without having unregistered, is kept while it answers polls, at most for a minute: a registry that was
just restarted lists no instance until that has registered again. One late answer to a poll is no failure.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.connector import Connection
from yarl import URL

from baton.errors import ConfigError, for_clients
from baton.plan.layout import parse_layout
from baton.serving.http import read_error
from baton.session.registry import Change, ChangeKind, RegistryClient, RegistryError, Role, Roster, Topology

FRESH_S = 3.0
ABSENT_S_MAX = 60.0
SILENT_S_MAX = 15.0
"""Longer than a member takes to register with a new registry, and than a busy instance takes to answer."""
POLL_S_LIMIT = 5.0
REPOLL_S = 0.2
IDLE_S_MAX = 30.0
"""Below the time for which servers keep an idle connection, so that none is used while it is closed."""
RESPONSE_BYTES_MAX = 256 << 20
NUM_TARGETS_MAX = 1024

RANK_HEADER = "X-data-parallel-rank"
"""Which of vLLM's data-parallel engines is meant. In rosters the URL of such an engine ends with its rank, as
in http://host:8000/dp1; that part is never sent."""
_RANK = re.compile(r"/dp([0-9]{1,4})/?\Z")

_DRAFTED = " with drafts"

Headers = tuple[tuple[str, str], ...]

log = logging.getLogger("baton.serving.fleet")


# ---- the HTTP client


class UpstreamError(Exception):
    """No response came, or not all of it; `code` is a key of baton.serving.http.STATUSES, or REFUSED."""

    def __init__(self, text: str, code: str = "PEER_LOST") -> None:
        super().__init__(text)
        self.text = text
        self.code = code

    @staticmethod
    def of(error: Exception) -> UpstreamError:
        """The same for what aiohttp or a socket raised."""
        match error:
            case aiohttp.ClientSSLError():
                return UpstreamError(f"TLS failed: {error}", "REFUSED_AUTHENTICATION")
            case aiohttp.ClientConnectorError():
                reason = error.os_error.strerror or str(error.os_error)
                return UpstreamError(f"{error.host}:{error.port} cannot be reached: {reason}", "REFUSED")
            case TimeoutError():
                return UpstreamError("it did not accept a connection in time")
            case _:
                reason = " ".join(str(error).split())  # the parser's errors have several lines
                return UpstreamError(f"the connection was lost: {reason or type(error).__name__}")


class UpstreamClient:
    """The router's HTTP client: one session and one pool of connections for all instances.

    `session` is for polls and for small requests. The requests of clients, two for each hand-over, bypass
    it: a session and its request and response objects cost twice as much as everything else that they need.
    They take a connection from the session's connector, send a head that was made once for each URL, and read
    what aiohttp's own protocol has parsed.
    """

    def __init__(self, key: str, connect_s_max: float, ssl_context: ssl.SSLContext | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s_max)
        self._connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_S_MAX, ssl=True if ssl_context is None else ssl_context
        )
        self.session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=self._timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._targets: dict[tuple[str, str, Headers], PostTarget] = {}

    async def close(self) -> None:
        for target in self._targets.values():
            target.close()
        await self.session.close()

    def target(self, base: str, path: str, more: Headers = ()) -> PostTarget:
        """Where requests of clients to this URL, with these headers besides, are posted."""
        target = self._targets.get((base, path, more))
        if target is None:
            if len(self._targets) >= NUM_TARGETS_MAX:  # instances come and go
                self._targets.pop(next(iter(self._targets))).close()
            url = URL(base + path, encoded=True)
            headers = {**self.session.headers, "Content-Type": "application/json", **dict(more)}
            request = aiohttp.ClientRequest("POST", url, headers=headers, session=self.session)
            lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"Host: {request.headers['Host']}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            head = "\r\n".join([*lines, "Content-Length: "]).encode()
            target = self._targets[base, path, more] = PostTarget(request, head)
        return target

    async def connect(self, target: PostTarget) -> Connection:
        """A new connection; raises what aiohttp and sockets raise."""
        connection = await self._connector.connect(target.request, [], self._timeout)
        assert connection.protocol is not None
        connection.protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        return connection


class PostTarget:
    """One URL that requests are posted to: the head that they share, and connections for the next ones."""

    def __init__(self, request: aiohttp.ClientRequest, head: bytes) -> None:
        self.request = request
        """For the connector: which connections these are."""
        self.head = head
        """Up to the value of Content-Length, which comes last."""
        self.idle: deque[tuple[Connection, float]] = deque()
        """With the time since when; the last one is used first."""
        self._closing: asyncio.TimerHandle | None = None

    def take(self) -> Connection | None:
        """An idle connection, if there is one that can be used."""
        while self.idle:
            connection, since_s = self.idle.pop()
            protocol = connection.protocol
            is_usable = protocol is not None and protocol.is_connected() and not protocol.should_close
            if is_usable and monotonic() - since_s < IDLE_S_MAX:
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        """The response on it is complete."""
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None or protocol.should_close:
            connection.close()
        elif transport.get_write_buffer_size():
            connection.close()  # the response came before all of the request was sent
        else:
            self.idle.append((connection, monotonic()))
            if self._closing is None:
                self._close_later()

    def _close_later(self) -> None:
        wait_s = self.idle[0][1] + IDLE_S_MAX - monotonic()
        self._closing = asyncio.get_running_loop().call_later(wait_s, self._close_idle)

    def _close_idle(self) -> None:
        """Closes what was idle for too long, also where no request comes any more."""
        self._closing = None
        while self.idle and monotonic() - self.idle[0][1] >= IDLE_S_MAX:
            self.idle.popleft()[0].close()
        if self.idle:
            self._close_later()

    def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        for connection, _ in self.idle:
            connection.close()
        self.idle.clear()


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    timeout_s: float,
    body: bytes | None = None,
    bytes_max: int = RESPONSE_BYTES_MAX,
) -> tuple[int, bytes]:
    """GETs a small response, or POSTs; raises UpstreamError where none comes in time."""
    request: dict[str, Any] = {"allow_redirects": False}
    if body is not None:
        request |= {"data": body, "headers": {"Content-Type": "application/json"}}
    parts = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request("GET" if body is None else "POST", URL(url, encoded=True), **request) as response,
        ):
            async for part in response.content.iter_any():
                parts += part
                if len(parts) > bytes_max:
                    raise UpstreamError(f"the response is longer than {bytes_max} bytes")
            return response.status, bytes(parts)
    except aiohttp.ClientError as error:
        raise UpstreamError.of(error) from None
    except TimeoutError:
        raise UpstreamError(f"no response to {url} within {timeout_s:g} s", "DEADLINE") from None
    except OSError as error:
        raise UpstreamError.of(error) from None


def instance_base(url: str) -> str:
    """An instance's URL without a trailing slash and rank; a ConfigError where it cannot be used."""
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    base = _RANK.sub("", url).rstrip("/")
    if not is_good or parts.scheme not in ("http", "https") or urlsplit(base).path:
        raise ConfigError(f"instance URL {url!r} cannot be used; it has to be http://host:port or https")
    return base


def _rank_headers(url: str) -> Headers:
    match = _RANK.search(url)
    return () if match is None else ((RANK_HEADER, match[1]),)


# ---- instances


class InstanceLoad(msgspec.Struct, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    num_queue_max: int = 0
    num_steps: int = 0
    """That it has computed; 0 where it does not say."""


class InstancePages(msgspec.Struct, frozen=True):
    """Pages of its KV cache by state; `cached` are some of the free ones."""

    free: int = 0
    cached: int = 0
    used: int = 0
    leased: int = 0
    quarantined: int = 0
    total: int = 0


class InstanceRates(msgspec.Struct, frozen=True):
    """Measured rates; 0 or None where nothing was measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    handoff_s: float | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """The fields of an instance's /server_info that a router reads."""

    name: str = ""
    model: str = ""
    models: tuple[str, ...] = ()
    """All names that it serves, where there are several."""
    pairs_by: str = ""
    """What it is paired by, where that is not the fingerprint in the registry."""
    epoch: int = 0
    coordinator: str = ""
    chunk_tokens: int = 0
    has_draft: bool = False
    sampling_defaults: Mapping[str, float] | None = msgspec.field(default_factory=dict)
    """Equal on both sides of a hand-over, since both sample; None while the checkpoint is not read."""
    is_ready: bool = False
    is_draining: bool = False
    load: InstanceLoad = InstanceLoad()
    pages: InstancePages = InstancePages()
    rates: InstanceRates = InstanceRates()


@dataclass(slots=True)
class InstanceHealth:
    """Results of the last polls."""

    is_healthy: bool = False
    problem: str = "not polled yet"
    heard_s: float = field(default_factory=monotonic)
    """When it last answered a poll."""
    healthy_s: float = field(default_factory=monotonic)
    """When a poll last found it healthy."""
    moved_s: float = -inf
    """When it was last found to have computed something."""
    info: ServerInfo = field(default_factory=ServerInfo)
    epoch: int = 0
    """The last one that was ready; 0 before any was."""
    num_tokens_given: int = 0
    """What this router had given it when it last reported its load."""


class OpenRequest(Protocol):
    """A request that an instance is answering."""

    def fail(self, error: UpstreamError) -> None:
        """The instance is lost."""

    def check(self, now_s: float, unheard_s: float) -> None:
        """Ends it where it takes too long; the instance last answered a poll so long ago."""


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """The fields that match requests and instances, from one report of an instance."""

    roster: Roster
    info: ServerInfo
    names: frozenset[str]
    """That clients may ask for: each name, and the last part of a path."""
    samples_as: str
    """Equal on instances that give the same request the same tokens."""
    gives: tuple[str, ...]
    """The caches that it can hand over; with drafts also those that have the draft layer's part."""


class FleetInstance:
    """One instance, through all its epochs."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        """What the registry says of it."""
        self.name = roster.instance
        self.role = roster.role
        self.base = instance_base(roster.url)
        self.headers = _rank_headers(roster.url)
        """Of every request, beside the usual ones."""
        self.health = InstanceHealth()
        self.upstreams: set[OpenRequest] = set()
        self.num_in_flight = 0
        self.num_tokens = 0
        """In flight, as far as this router gave them."""
        self.num_local_tokens = 0
        """Of prompts that it prefills itself although it is a decode instance."""
        self.full_until_s = 0.0
        self.is_leaving = False
        """It has unregistered."""
        self.absent_s: float | None = None
        """Since when the registry does not list it."""
        self._woken = asyncio.Event()
        self._identity: InstanceIdentity | None = None

    @property
    def coordinator(self) -> str:
        """Of the epoch that runs now."""
        info = self.health.info
        is_known = info.coordinator and info.epoch >= self.roster.epoch
        return info.coordinator if is_known else self.roster.coordinator

    @property
    def fingerprint(self) -> str:
        """Equal on instances of one model."""
        return self.health.info.pairs_by or self.roster.fingerprint

    @property
    def identity(self) -> InstanceIdentity:
        """Of the latest report. It is made once, since it is read of every instance for every request."""
        identity, roster, info = self._identity, self.roster, self.health.info
        if identity is None or identity.info is not info or identity.roster is not roster:
            names = {part for own in self.models for part in (own, own.rstrip("/").rpartition("/")[2])}
            samples_as = f"{self.fingerprint} {sorted((info.sampling_defaults or {}).items())}"
            gives = (samples_as, samples_as + _DRAFTED) if info.has_draft else (samples_as,)
            identity = self._identity = InstanceIdentity(roster, info, frozenset(names), samples_as, gives)
        return identity

    @property
    def needs(self) -> str:
        """The cache that it has to receive, as prefill instances name it in `gives`."""
        return self.identity.gives[-1]

    @property
    def num_dp_groups(self) -> int:
        layout = self.roster.layout
        return parse_layout(layout).size("dp") if layout else 1

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.health.info.model

    @property
    def models(self) -> tuple[str, ...]:
        """All names that clients may ask for."""
        info = self.health.info
        return info.models or ((info.model,) if info.model else ())

    def serves(self, model: str) -> bool:
        """Whether a client means this model: by its name, or by the last part of a path."""
        return model in self.identity.names

    @property
    def is_able(self) -> bool:
        """Whether it can be given new requests."""
        health = self.health
        info = health.info
        return (
            health.is_healthy
            and info.is_ready
            and not info.is_draining
            and not self.is_leaving
            and info.epoch >= self.roster.epoch
        )

    def is_fresh(self, now_s: float) -> bool:
        """Whether it has answered lately."""
        return now_s - self.health.heard_s < FRESH_S

    @property
    def state(self) -> str:
        """One word for people and metrics."""
        if self.is_leaving:
            return "leaving"
        if self.health.info.is_draining:
            return "draining"
        if not self.health.is_healthy:
            return "unhealthy"
        return "able" if self.is_able else "loading"

    @property
    def load_tokens(self) -> int:
        """Tokens in flight: what this router gave it, and what it had beyond that at the last poll."""
        beyond = self.health.info.load.num_tokens - self.health.num_tokens_given
        return self.num_tokens + max(0, beyond)

    def charge(self, num_requests: int, num_tokens: int) -> None:
        """This router gave it so much more, or less."""
        self.num_in_flight += num_requests
        self.num_tokens += num_tokens

    def has_room(self, num_in_flight_max: int, now_s: float) -> bool:
        return self.num_in_flight < num_in_flight_max and now_s >= self.full_until_s

    def update_roster(self, roster: Roster) -> bool:
        """Takes the registry's latest entry; returns whether it is of an epoch that is new here."""
        if roster.epoch < self.roster.epoch:
            return False
        # An epoch that the instance reported itself is not new: it may have requests already.
        is_new = roster.epoch > max(self.roster.epoch, self.health.epoch)
        if is_new:
            self.lose(f"{self.name} has restarted (epoch {roster.epoch})")
            self.health.is_healthy = False
            self.wake()
        if roster.url != self.roster.url:
            self.base = instance_base(roster.url)
            self.headers = _rank_headers(roster.url)
        self.roster, self.role = roster, roster.role
        self.absent_s = None
        self.is_leaving = False
        return is_new

    def update_info(self, info: ServerInfo) -> bool:
        """Takes what it reports of itself; returns whether it is of another epoch than before."""
        is_new = info.is_ready and 0 < self.health.epoch < info.epoch
        if is_new:
            self.lose(f"{self.name} has restarted (epoch {info.epoch})")
        if info.is_ready:
            self.health.epoch = info.epoch
        if info.load.num_steps != self.health.info.load.num_steps:
            self.health.moved_s = monotonic()
        self.health.info = info
        self.health.num_tokens_given = self.num_tokens
        return is_new

    def lose(self, text: str) -> None:
        """Ends every upstream request at once: no response can come."""
        for upstream in list(self.upstreams):
            upstream.fail(UpstreamError(text))

    def doubt(self, text: str) -> None:
        """Somebody reports that it has ended: it gets nothing new until it has answered a poll."""
        was_able = self.is_able
        self.health.is_healthy = False
        self.health.problem = text
        if was_able:
            log.warning("%s", _described(self))
        self.wake()

    def summary(self) -> dict[str, Any]:
        """For the router's /server_info and its page."""
        info = self.health.info
        return {
            "name": self.name,
            "role": self.role.value,
            "layout": self.roster.layout,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "epoch": max(self.roster.epoch, info.epoch),
            "url": self.roster.url,
            "coordinator": self.coordinator,
            "state": self.state,
            "problem": self.health.problem,
            "num_in_flight": self.num_in_flight,
            "num_tokens": self.load_tokens,
            "load": info.load,
            "pages": info.pages,
            "rates": info.rates,
        }

    def wake(self) -> None:
        """Polls it now."""
        self._woken.set()

    async def pause(self, wait_s: float) -> None:
        """Until the next poll."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        self._woken.clear()


def _caches(prefills: Iterable[FleetInstance]) -> set[str]:
    return {cache for instance in prefills for cache in instance.identity.gives}


class Fleet:
    """Instances by name."""

    def __init__(self, fixed: Sequence[Roster] = ()) -> None:
        self.instances: dict[str, FleetInstance] = {}
        self.is_registry_known = False
        """Whether the registry has ever answered; true where there is none."""
        self._fixed = tuple(fixed)
        """Instances that are known without a registry."""
        self.on_join: Callable[[FleetInstance], None] = lambda instance: None
        self.on_end: Callable[[FleetInstance], None] = lambda instance: None
        """An epoch of it has ended, and its prefix cache with it; the instance may have restarted."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when an instance comes, goes or changes its state."""
        self._refused: dict[str, str] = {}
        self._unpaired = ""

    def apply(self, rosters: Iterable[Roster]) -> None:
        """The registry's whole view; empty where there is no registry."""
        self.is_registry_known = True
        present = {roster.instance: roster for roster in (*self._fixed, *rosters)}
        for roster in present.values():
            self._put(roster)
        for name, instance in self.instances.items():
            if name not in present and instance.absent_s is None:
                instance.absent_s = monotonic()
        self.sweep()
        self.on_change()

    def depart(self, name: str, epoch: int) -> None:
        """An instance has unregistered: it gets nothing new, and may finish what it has."""
        instance = self.instances.get(name)
        if instance is not None and instance.roster.epoch <= epoch:
            instance.is_leaving = True
            instance.absent_s = monotonic()
            instance.wake()

    def sweep(self) -> None:
        """Drops instances that have gone, and logs those that cannot be paired."""
        unpaired = self.unpaired_text()
        if unpaired and unpaired != self._unpaired:
            log.warning("%s", unpaired)
        self._unpaired = unpaired
        now_s = monotonic()
        for instance in [known for known in self.instances.values() if _has_gone(known, now_s)]:
            del self.instances[instance.name]
            instance.lose(f"{instance.name} has gone")
            instance.wake()  # ends its polls
            self.on_end(instance)
            self.on_change()

    def able(self, role: Role | None = None) -> list[FleetInstance]:
        """The instances, of this role or of any, that can be given new requests."""
        instances = self.instances.values()
        return [known for known in instances if known.is_able and (role is None or known.role is role)]

    def model_name(self, wanted: str | None) -> str:
        """The name, in /v1/models, of the model that a request means; empty where that is not one model.

        A name that no instance serves is never returned: a client cannot make labels of metrics.
        """
        known = [instance for instance in self.instances.values() if instance.model]
        named = [instance for instance in known if wanted is None or instance.serves(wanted)]
        if all(instance.role is Role.PREFILL for instance in named):
            fingerprints = {instance.fingerprint for instance in named}
            named = [instance for instance in known if instance.fingerprint in fingerprints]
        names = {instance.model for instance in named if instance.role is not Role.PREFILL}
        names = names or {instance.model for instance in named}
        return names.pop() if len(names) == 1 else ""

    def model_names(self) -> set[str]:
        """All that `model_name` can return for a request of now."""
        names = {self.model_name(instance.model) for instance in self.instances.values() if instance.model}
        return names - {""}

    def unpaired(self) -> list[FleetInstance]:
        """Instances that can never hand over: none of the other role has the same model and settings."""
        polled = [
            instance
            for instance in self.instances.values()
            if instance.model and instance.health.info.sampling_defaults is not None
        ]
        sides = [
            [instance for instance in polled if instance.role is role] for role in (Role.PREFILL, Role.DECODE)
        ]
        if not all(sides):
            return []
        given, needed = _caches(sides[0]), {instance.needs for instance in sides[1]}
        lone_prefills = [instance for instance in sides[0] if needed.isdisjoint(instance.identity.gives)]
        return lone_prefills + [instance for instance in sides[1] if instance.needs not in given]

    def unpaired_text(self) -> str:
        """The same for people; empty where there are none."""
        alone = self.unpaired()
        names = ", ".join(f"{instance.name} ({instance.model})" for instance in alone)
        reason = "no peer has the same config and weights"
        remedy = "serve the same checkpoint on both sides, from any path"
        prefills = [instance for instance in self.instances.values() if instance.role is Role.PREFILL]
        decodes = [instance for instance in alone if instance.role is Role.DECODE]
        sampled = {instance.identity.samples_as for instance in prefills}
        if any(decode.identity.samples_as in sampled for decode in decodes):
            reason = "decode with --draft needs prefill with --draft"
            remedy = "give it to both sides, or to prefill alone"
        elif any(decode.fingerprint == instance.fingerprint for decode in decodes for instance in prefills):
            reason = "prefill and decode have different sampling defaults"
            remedy = "give both the same --generation-config and generation_config.json"
        return f"no hand-over for {names}: {reason}; {remedy}" if names else ""

    def missing(self) -> str:
        """Why nothing can be handed over now; empty where there is a pair or an instance for both."""
        able = self.able()
        if any(instance.role is Role.BOTH for instance in able):
            return ""
        sides = {
            role: [instance for instance in able if instance.role is role]
            for role in (Role.PREFILL, Role.DECODE)
        }
        if all(sides.values()):
            if {instance.needs for instance in sides[Role.DECODE]} & _caches(sides[Role.PREFILL]):
                return ""
            return self.unpaired_text() or "no prefill and decode instance of the same model is able"
        absent = [role.value for role, side in sides.items() if not side]
        text = f"no {' and no '.join(absent)} instance is able"
        if not self.is_registry_known:
            return f"{text}: the registry has not answered yet"
        states = ", ".join(_described(instance) for instance in self.instances.values())
        return f"{text}: {states or 'none has registered'}"

    def _put(self, roster: Roster) -> None:
        name = roster.instance
        known = self.instances.get(name)
        try:
            if known is not None:
                if known.update_roster(roster):
                    self.on_end(known)
                return
            instance = FleetInstance(roster)
        except ConfigError as error:
            if self._refused.get(name) != roster.url:
                log.warning("instance %s is not used: %s", name, error)
            self._refused = {**dict(list(self._refused.items())[-100:]), name: roster.url}
            return
        self.instances[name] = instance
        self.on_join(instance)


def _described(instance: FleetInstance) -> str:
    problem = for_clients(instance.health.problem)
    return f"{instance.name} is {instance.state}" + (f" ({problem})" if problem else "")


def _has_gone(instance: FleetInstance, now_s: float) -> bool:
    if instance.absent_s is None:
        return False
    if instance.is_leaving:
        return not instance.upstreams and not instance.health.is_healthy
    absent_s = now_s - instance.absent_s
    silent_s = 0.0 if instance.health.is_healthy else now_s - instance.health.heard_s
    return absent_s > ABSENT_S_MAX or min(absent_s, silent_s) > SILENT_S_MAX


class InfoReader(Protocol):
    """How an engine's instances describe themselves."""

    info_path: str
    """What is polled beside /health."""
    key_remedy: str
    """What to do where an instance refuses the router's key."""

    def read_info(self, instance: FleetInstance, body: bytes) -> ServerInfo:
        """Reads the response of `info_path`; raises msgspec.DecodeError."""


class FleetWatcher:
    """Keeps a fleet up to date: the registry lists the instances, polls tell their health."""

    def __init__(
        self,
        fleet: Fleet,
        reader: InfoReader,
        session: aiohttp.ClientSession,
        poll_s: float,
        poll_s_max: float,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._fleet = fleet
        self._reader = reader
        self._session = session
        self._poll_s = poll_s
        self._poll_s_max = min(POLL_S_LIMIT, poll_s_max)
        """How long one poll may take."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_failure = on_failure
        """Called where the fleet is no longer watched, which is a bug."""
        fleet.on_join = lambda instance: self._spawn(self._follow(instance))

    def start(self, registry: RegistryClient | None) -> None:
        if registry is None:
            self._fleet.apply(())
        else:
            self._spawn(self._follow_registry(registry))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("watching the instances failed", exc_info=error)
            self._on_failure(error)

    async def _follow_registry(self, registry: RegistryClient) -> None:
        async for event in registry.watch():
            if isinstance(event, Topology):
                self._apply(event)
            else:
                await self._on_change(registry, event)

    async def _on_change(self, registry: RegistryClient, change: Change) -> None:
        if change.what is ChangeKind.UNREGISTERED:
            self._fleet.depart(change.member.instance, change.member.epoch)
        if change.what is ChangeKind.REGISTERED and not change.is_complete:
            return
        try:
            self._apply(await registry.topology())
        except RegistryError as error:  # the watch ends too, and begins again with a whole view
            log.info("cannot read the topology, keeping the last one: %s", error)

    def _apply(self, topology: Topology) -> None:
        self._fleet.apply(roster for roster in topology.instances if roster.is_complete and roster.url)

    async def _follow(self, instance: FleetInstance) -> None:
        while self._fleet.instances.get(instance.name) is instance:
            former = instance.state
            await self._poll(instance)
            now_s = monotonic()
            for request in list(instance.upstreams):
                request.check(now_s, now_s - instance.health.heard_s)
            if instance.state != former:
                log.info("%s", _described(instance))
                self._fleet.on_change()
            self._fleet.sweep()
            await instance.pause(self._poll_s if instance.is_able else REPOLL_S)

    async def _poll(self, instance: FleetInstance) -> None:
        health, info_path = instance.health, self._reader.info_path
        try:
            (status, body), info = await asyncio.gather(
                fetch(self._session, f"{instance.base}/health", self._poll_s_max),
                fetch(self._session, instance.base + info_path, self._poll_s_max),
            )
        except UpstreamError as error:
            health.is_healthy = False
            health.problem = error.text
            health.info = msgspec.structs.replace(health.info, is_draining=False)
            if error.code == "REFUSED":  # nothing listens there any more: the process has ended
                instance.lose(f"{instance.name} has ended: {error.text}")
                self._fleet.on_end(instance)
            return
        health.heard_s = monotonic()
        health.problem = "" if status == 200 else read_error(status, body).message
        try:
            if info[0] != 200:
                remedy = f"; {self._reader.key_remedy}" if info[0] in (401, 403) else ""
                status, health.problem = 0, f"{info_path}: {read_error(*info).message}{remedy}"
            elif instance.update_info(self._reader.read_info(instance, info[1])):
                self._fleet.on_end(instance)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            status, health.problem = 0, f"its {info_path} cannot be read: {error}"
        health.is_healthy = status == 200
        if health.is_healthy:
            health.healthy_s = health.heard_s
