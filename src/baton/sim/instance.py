"""One life of an instance: its processes, drivers and page pools, which end together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baton.plan.ownership import Spec
from baton.plan.steps import ALWAYS_PACK, NEVER_PACK
from baton.protocol.handshake import MEMBER, SESSION, Party
from baton.protocol.source_rank import SourceRankState
from baton.session.config import DriverConfig
from baton.session.coordinator import CoordinatorDriver
from baton.session.memory import Pools
from baton.session.rank import RankDriver
from baton.sim.content import SimPagePool
from baton.sim.core import Context, SimProcess, SkewedClock
from baton.sim.network import Host, Network, address_of, join_member
from baton.sim.transport import NAME, Fabric, SimTransport
from baton.transport.base import Completion

SECRET = b"a secret of the simulated kind"
FINGERPRINT = "model"
MEMBER_S = 0.0001
POLL_S = 0.00003
STAGING_BYTES = 4096


class Incarnation:
    """Everything that an instance is from one start to the end of its last process."""

    def __init__(
        self, context: Context, network: Network, fabric: Fabric, *, name: str, epoch: int, spec: Spec
    ) -> None:
        self.context = context
        self.network = network
        self.fabric = fabric
        self.name = name
        self.epoch = epoch
        self.spec = spec
        options = context.options
        cost = ALWAYS_PACK if options.is_packing else NEVER_PACK
        self.config = DriverConfig(name, epoch, spec, NAME, FINGERPRINT, options.timings, cost)
        self.processes: list[SimProcess] = []
        self.coordinator: Host | None = None
        self.hosts: dict[int, Host] = {}
        self.drivers: dict[int, RankDriver] = {}
        self.pools: dict[int, SimPagePool] = {}
        self.transports: dict[int, SimTransport] = {}

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive for process in self.processes)

    def start(
        self,
        versions: tuple[int, int],
        taken_share: float,
        *,
        lingers: Callable[[], bool],
        on_death: Callable[[Incarnation], None],
        after_call: Callable[[int], None],
    ) -> None:
        """Starts a process for each rank, and the coordinator in rank 0's process or in its own.

        Other work takes a share of the pages. `lingers` says whether copies outlive the process that began
        them; `after_call` is called with a rank after each call into its driver.
        """
        processes = [
            self._process(f"{self.name}/{rank}", on_death) for rank in range(self.spec.layout.num_ranks)
        ]
        is_apart = self.context.rng(f"place/{self.name}").random() < 0.3
        home = self._process(f"{self.name}/c", on_death) if is_apart else processes[0]
        coordinator = self.coordinator = self._start_coordinator(home, versions)
        for rank, process in enumerate(processes):
            self._start_rank(process, rank, taken_share, lingers)
            self.hosts[rank].after_call = partial(after_call, rank)
            party = Party(self.drivers[rank].config.introduction(), SECRET, MEMBER, versions=versions)
            self.network.parties[self.hosts[rank].name] = party
            join_member(self.hosts[rank], coordinator, MEMBER_S)

    def _process(self, name: str, on_death: Callable[[Incarnation], None]) -> SimProcess:
        offset_s, rate = self.context.draw_clock()
        process = SimProcess(name, self.name, self.epoch, SkewedClock(self.context.schedule, offset_s, rate))
        process.at_death.append(partial(on_death, self))
        self.processes.append(process)
        return process

    def _host(self, process: SimProcess, name: str) -> Host:
        return Host(self.network, process, name, self.context.rng(f"host/{name}/{self.epoch}"))

    def _start_coordinator(self, process: SimProcess, versions: tuple[int, int]) -> Host:
        host = self._host(process, f"{self.name}/c")
        host.driver = CoordinatorDriver(self.config, host)
        party = Party(
            introduction=self.config.introduction(),
            secret=SECRET,
            accepts=frozenset({SESSION, MEMBER}),
            versions=versions,
        )
        self.network.listeners[address_of(self.name)] = host
        self.network.parties[host.name] = party
        process.at_death.append(partial(self.network.on_death, host))
        host.enter(host.driver.tick)
        return host

    def _start_rank(
        self, process: SimProcess, rank: int, taken_share: float, lingers: Callable[[], bool]
    ) -> None:
        host = self._host(process, f"{self.name}/{rank}")
        pool = SimPagePool(self.spec, rank)
        if taken_share:
            pool.fill(taken_share, host.rng)
        transport = SimTransport(
            self.fabric,
            host.name,
            self.context.options.strength,
            instance=process.incarnation,
            wake=lambda: process.call_after(POLL_S, self._poll, rank),
            is_running=process.is_running,
        )
        pools, config = Pools(pool.memory, transport, STAGING_BYTES), replace(self.config, rank=rank)
        if self.context.rng(f"attach/{self.name}").random() < self.context.options.epochless_share:
            config = replace(config, epoch=0)
        host.driver = self.drivers[rank] = RankDriver(config, host, transport, pools)
        self.hosts[rank], self.pools[rank], self.transports[rank] = host, pool, transport
        process.at_death.append(lambda: transport.die(lingers()))

    def _poll(self, rank: int) -> None:
        if events := self.transports[rank].poll():
            self.hosts[rank].enter(self._complete, rank, events)

    def _complete(self, rank: int, events: list[Completion]) -> None:
        for event in events:
            self.drivers[rank].source.on_completion(event)

    # What an engine calls on its ranks.

    def is_granted(self, rank: int, transfer: str) -> bool:
        """Whether a source rank has got the grant of a transfer; the handle does not say."""
        outgoing = self.drivers[rank].source.transfers.get(transfer)
        return outgoing is not None and outgoing.record.state is not SourceRankState.WAITING

    def drain(self) -> None:
        host = self.coordinator
        assert host is not None
        assert isinstance(host.driver, CoordinatorDriver)
        host.process.call(host.enter, host.driver.drain, "told to")

    def known_as(self, source: str) -> str:
        """What this instance calls a source: its name or its address, always the same one."""
        rng = random.Random(f"{self.context.seed}/{self.name}/{source}")
        return address_of(source) if rng.random() < self.context.options.address_share else source
