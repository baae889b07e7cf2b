"""What an engine holds: one endpoint per rank, attached to its instance's coordinator.

One process of an instance hosts the coordinator (the endpoint that is given none); the others are given its
address. A scheduler that polls reads `state` of its handles, one that awaits uses `settled()`, and
`on_change` calls back, on the endpoint's own thread, whenever a handle changed.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Self

from baton.errors import ConfigError, LocalProtocolError
from baton.plan import PackCost, Spec
from baton.plan.steps import NEVER_PACK
from baton.protocol.handshake import MEMBER, SESSION, Party
from baton.protocol.instance import PACKING, ROLES
from baton.protocol.outcomes import Stage, Why
from baton.protocol.timings import Timings
from baton.session.config import DriverConfig
from baton.session.coordinator import CoordinatorDriver
from baton.session.handles import Digest, Handle, Receiving, Request, Sending
from baton.session.links import SocketConfig
from baton.session.loop import LOCAL, DriverLoop, exit_loudly
from baton.session.memory import Pools, check_buffers, tensors
from baton.session.rank import RankDriver
from baton.session.registry import Member, RegistryClient, RegistryServer, Role
from baton.transport import Bytes, Transport

ANSWER_S_MAX = 10.0
"""How long a call waits for the endpoint's own thread."""


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Who this rank is, which instance it belongs to, and how long things may take."""

    instance: str
    spec: Spec
    rank: int
    secret: bytes = field(repr=False)
    role: str = "both"
    epoch: int = 0
    """The incarnation: the same on all ranks of an instance, larger with every start. 0: made here by the
    endpoint that hosts the coordinator, and learned from the coordinator by the others."""
    coordinator: str | None = None
    """Where the coordinator is, as host:port; None: this endpoint hosts it."""
    attach_s: float = 30.0
    """With a coordinator and epoch 0: how long to wait for the coordinator to listen."""
    registry: str | None = None
    """The registry's URL."""
    embed_registry: int | None = None
    """The port of a registry to be hosted here; 0 takes any."""
    fingerprint: str = ""
    url: str = ""
    """Where the instance answers HTTP, for the registry; the same on all ranks, empty: nowhere."""
    sockets: SocketConfig = field(default_factory=SocketConfig)
    timings: Timings = field(default_factory=Timings)
    staging_bytes: int = 0
    """Memory to pack and convert in, the same on all ranks; without it dtypes have to agree."""
    packing: str = "cost"
    """Where the target's plans pack, if there is staging: `cost`, also where that is faster than many small
    copies; `convert`, only where the dtype changes."""
    ungranted_share_max: float = 0.5
    """The share of a source's pool that requests without a grant may hold together. The rest is for requests
    that receive: only an instance that is never a target can do with a share of 1."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role {self.role!r} is not known; use {', '.join(ROLES)}")
        if self.packing not in PACKING:
            raise ConfigError(f"packing {self.packing!r} is not known; use {' or '.join(PACKING)}")
        if not 0 <= self.rank < self.spec.layout.num_ranks:
            raise ConfigError(f"rank {self.rank}: {self.spec.layout} has {self.spec.layout.num_ranks} ranks")
        if not 0 < self.ungranted_share_max <= 1:
            raise ConfigError(
                f"ungranted_share_max {self.ungranted_share_max}: give a share of the pool in (0, 1]"
            )
        if self.epoch < 0:
            raise ConfigError(f"epoch {self.epoch}: give 1 or more, or 0 to learn it from the coordinator")
        if not 0 <= self.attach_s < math.inf:
            raise ConfigError(f"attach_s is {self.attach_s}; give a finite number of seconds from 0")


class Membership:
    """Used inside the endpoint's loop alone."""

    def __init__(self, config: EndpointConfig, transport: str, on_displaced: Callable[[str], None]) -> None:
        self.config = config
        self.on_displaced = on_displaced
        """Called when a newer incarnation of this instance has registered: this one is over."""
        self.transport = transport
        self.url = config.registry
        self._is_registered = False
        self.served = threading.Event()
        """Set when the URL of the registry, if there is one, is known."""
        self._server: RegistryServer | None = None
        self._client: RegistryClient | None = None

    async def serve(self, address: str) -> None:
        """Hosts a registry if that was asked for, and registers this rank; asked again, does nothing."""
        config = self.config
        if self._is_registered:
            return
        self._is_registered = True
        if config.embed_registry is not None:
            accepting = config.sockets.tls.accepting() if config.sockets.tls else None
            self._server = RegistryServer(config.secret, ssl_context=accepting)
            await self._server.start(config.sockets.host, config.embed_registry)
            self.url = self._server.url
        self.served.set()
        if self.url is None:
            return
        dialling = config.sockets.tls.dialling() if config.sockets.tls else None
        self._client = RegistryClient(
            self.url, config.secret, ssl_context=dialling, on_displaced=self.on_displaced
        )
        self._client.register(
            Member(
                instance=config.instance,
                role=Role(config.role),
                rank=config.rank,
                epoch=config.epoch,
                layout=str(config.spec.layout),
                coordinator=config.coordinator or address,
                fingerprint=config.fingerprint or "none",
                transport=self.transport,
                url=config.url,
            )
        )

    async def look_up(self, instance: str) -> str:
        """The address of an instance's coordinator."""
        if self._client is None:
            raise ConfigError(
                f"source {instance!r}: there is no registry to find it in; give the endpoint one, or name "
                "the source by its coordinator's host:port"
            )
        return await self._client.coordinator(instance)

    async def close(self) -> None:
        """Unregisters, and ends the registry if it was hosted here."""
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()


class EndpointBase(ABC):
    """The interface of an endpoint, in this process or in another."""

    config: EndpointConfig
    _is_open = True

    @property
    def epoch(self) -> int:
        """The incarnation that this rank belongs to; 0 until it has learned it."""
        return self.config.epoch

    @abstractmethod
    def close(self) -> None:
        """Ends this rank, and with the coordinator the instance."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise LocalProtocolError(
                f"rank {self.config.rank} of {self.config.instance} is closed; make a new endpoint"
            )


class Endpoint(EndpointBase):
    """One rank's end of every hand-over."""

    def __init__(
        self,
        config: EndpointConfig,
        pools: Mapping[str, Bytes],
        transport: Transport,
        on_end: Callable[[str], None] = exit_loudly,
    ) -> None:
        is_host = config.coordinator is None
        self.config = replace(config, epoch=time.time_ns()) if is_host and not config.epoch else config
        self.transport = transport
        self._on_end = on_end
        self._membership = Membership(self.config, transport.name, self._end)
        self._loop = DriverLoop(config.sockets, directory=self._membership, on_end=self._end)
        self._serving = threading.Event()
        own = self.config
        self._driver = DriverConfig(
            instance=own.instance,
            epoch=own.epoch,
            spec=own.spec,
            transport=transport.name,
            fingerprint=own.fingerprint,
            timings=own.timings,
            cost=PackCost() if own.staging_bytes and own.packing == "cost" else NEVER_PACK,
            ungranted_share_max=own.ungranted_share_max,
        )
        self.coordinator = self._host() if config.coordinator is None else None
        self._rank = self._join(pools)
        self._loop.start()
        self._loop.post(self._attach)

    def _host(self) -> CoordinatorDriver:
        own, config = self.config, self._driver
        party = Party(config.introduction(), own.secret, SESSION, frozenset({SESSION, MEMBER}))
        ports = self._loop.ports(party)
        driver = CoordinatorDriver(config, ports)
        driver.on_serving = self._serving.set
        self._loop.add(ports, driver)
        return driver

    def _join(self, pools: Mapping[str, Bytes]) -> RankDriver:
        own = self.config
        config = replace(self._driver, rank=own.rank)
        party = Party(config.introduction(), own.secret, MEMBER)
        ports = self._loop.ports(party)
        if own.staging_bytes:
            # torch takes seconds to import: now, instead of with the first chunk that is packed.
            tensors()
        check_buffers(own.spec, own.rank, pools)
        registered = Pools(pools, self.transport, own.staging_bytes)
        driver = RankDriver(config, ports, self.transport, registered)
        driver.on_attached = self._attached
        if self.coordinator is None:
            driver.on_accepted = self._serving.set
        self._loop.add(ports, driver)
        self._loop.watch(self.transport, driver.source.on_completion)
        return driver

    def _end(self, text: str) -> None:
        """The instance is over: nothing waits for what cannot come any more."""
        self._is_open = False
        self._serving.set()
        self._membership.served.set()
        try:
            self._rank.over(self._rank.config.cause(Why.PEER_LOST, Stage.COPY, text))
        finally:
            self._on_end(text)

    def _attach(self) -> None:
        own = self.config
        self._rank.attach(own.coordinator or LOCAL, 0.0 if own.epoch else own.attach_s)

    def _attached(self, epoch: int) -> None:
        self.config = self._membership.config = replace(self.config, epoch=epoch)

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self.config.coordinator or self._loop.address

    @property
    def registry(self) -> str | None:
        """The URL of the registry, hosted here or elsewhere."""
        return self._membership.url

    def wait_ready(self, timeout_s: float = 30.0) -> bool:
        """Whether this rank is attached and, where the coordinator is hosted, every other one too, after
        waiting; False at once if the endpoint is over."""
        limit_s = time.monotonic() + timeout_s
        is_serving = self._serving.wait(timeout_s)
        is_served = is_serving and self._membership.served.wait(max(0.0, limit_s - time.monotonic()))
        return is_served and self._is_open

    def send(
        self, transfer_id: str, digest: Digest, progress_s: float | None = None, *, is_queued: bool = False
    ) -> Sending:
        """Source: begins to send this rank's part of a transfer.

        `progress_s`: how long it may go without progress; `Request` has the same for the target, and the
        longer of the two holds for both. `is_queued`: the engine cannot begin to prefill it yet. The target
        may grant it all the same; call `Sending.queued` again and again, while the engine's queue moves.
        """
        self._check_open()
        return self._rank.send(transfer_id, digest, progress_s, is_queued=is_queued)

    def receive(self, request: Request) -> Receiving:
        """Target: asks for a transfer, with the pages of this rank or of several."""
        self._check_open()
        return self._rank.receive(request)

    def decline(self, transfer_id: str, source: str, text: str) -> None:
        """Target: tells a source that there is no room for its transfer."""
        self._rank.decline(transfer_id, source, text)

    def queue(self, transfer_id: str, source: str) -> None:
        """Target: tells a source that its transfer waits for room; again and again, while the queue moves."""
        self._rank.queue(transfer_id, source)

    def on_change(self, callback: Callable[[Handle], None]) -> None:
        """Calls back on the endpoint's thread whenever a handle changed; it must neither block nor raise."""
        self._rank.on_change = callback

    def assign(self, transfer_id: str, dp: int | None = None) -> int:
        """Source, where the coordinator is hosted: the dp group that prefills a transfer.

        It is the one named, else the least loaded; asked again for the same transfer, the same one.
        """
        if self.coordinator is None:
            raise LocalProtocolError("dp groups are assigned where the coordinator is hosted")
        self._check_open()
        outbound, chosen = self.coordinator.outbound, Future[int]()

        def assign() -> None:
            try:
                chosen.set_result(outbound.assign(transfer_id, dp))
            except ConfigError as error:
                chosen.set_exception(error)

        self._loop.post(assign)
        return chosen.result(ANSWER_S_MAX)

    def quarantined(self) -> dict[str, int]:
        """Target, where the coordinator is hosted: pages by transfer that wait for quiet."""
        if self.coordinator is None:
            raise LocalProtocolError("quarantine is known where the coordinator is hosted")
        return self.coordinator.inbound.quarantined()

    def counts(self) -> dict[str, int]:
        """How much is under way on this rank and, where it is hosted, at the coordinator."""
        counts = dict(self._rank.counts())
        if self.coordinator is not None:
            counts |= self.coordinator.counts()
        return counts

    def close(self) -> None:
        """Ends this rank, and with the coordinator the instance; sockets and threads end."""
        self._is_open = False
        text = f"rank {self.config.rank} of {self.config.instance} was closed"
        self._loop.post(lambda: self._rank.leave(text))
        self._loop.close()
        self.transport.close()
