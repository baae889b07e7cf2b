"""One life of an instance: its processes, drivers, pools and engine, which end together."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from baton.plan.packing import ALWAYS_PACK, NEVER_PACK
from baton.plan.tokens import Ints
from baton.protocol.handshake import SESSION, Party
from baton.protocol.messages import VERSION_MAX, VERSION_MIN
from baton.protocol.source_rank import SourceRankState
from baton.session.config import InstanceConfig, RankConfig
from baton.session.coordinator import CoordinatorDriver
from baton.session.handles import Digest, Receiving, Sending
from baton.session.handles import Request as Asked
from baton.session.memory import Pools
from baton.session.rank import RankDriver
from baton.sim.engines.job import Job
from baton.sim.engines.source import SourceEngine
from baton.sim.engines.target import TargetEngine
from baton.sim.host import Host
from baton.sim.links import join
from baton.sim.network import Listener
from baton.sim.pool import Pool
from baton.sim.process import Clock, Process
from baton.sim.registry import address_of
from baton.sim.request import Attempt
from baton.sim.transport.endpoint import NAME, Owner, SimTransport

if TYPE_CHECKING:
    from baton.sim.instance import Instance

SECRET = b"a secret of the simulated kind"
FINGERPRINT = "model"
MEMBER_S = 0.0001
POLL_S = 0.00003
STAGING_BYTES = 4096


class Incarnation:
    """Everything that an instance is until it ends."""

    def __init__(self, instance: Instance, epoch: int) -> None:
        self.instance = instance
        self.epoch = epoch
        self.world = instance.world
        self.name = instance.name
        self.spec = instance.spec
        self.processes: list[Process] = []
        self.coordinator: Host | None = None
        self.hosts: dict[int, Host] = {}
        self.drivers: dict[int, RankDriver] = {}
        self.pools: dict[int, Pool] = {}
        self.transports: dict[int, SimTransport] = {}
        engine = SourceEngine if instance.is_source else TargetEngine
        self.engine = engine(self, self.world.chance.of(f"engine/{self.name}/{epoch}"))

    def start(self) -> None:
        """Starts every process; the coordinator lives in rank 0's or in its own."""
        ranks = range(self.spec.layout.num_ranks)
        processes = {rank: self._process(f"{self.name}/{rank}") for rank in ranks}
        is_apart = self.world.chance.of(f"place/{self.name}").random() < 0.3
        home = self._process(f"{self.name}/c") if is_apart else processes[0]
        self.coordinator = self._start_coordinator(home)
        for rank in ranks:
            self._start_rank(processes[rank], rank, self.coordinator)

    @property
    def is_alive(self) -> bool:
        """Whether nothing of it has died."""
        return all(process.is_alive for process in self.processes)

    def _process(self, name: str) -> Process:
        offset_s, rate = self.world.facts.draw_clock()
        process = Process(name, self.name, self.epoch, Clock(self.world.schedule, offset_s, rate))
        process.at_death.append(partial(self.instance.process_died, self))
        self.processes.append(process)
        return process

    def _host(self, process: Process, name: str) -> Host:
        return Host(self.world, process, name, self.world.chance.of(f"host/{name}/{self.epoch}"))

    def _start_coordinator(self, process: Process) -> Host:
        host = self._host(process, f"{self.name}/c")
        config = InstanceConfig(
            self.name, self.epoch, self.spec, NAME, FINGERPRINT, self.world.options.timings
        )
        driver = CoordinatorDriver(config, host)
        driver.inbound.cost = ALWAYS_PACK if self.world.options.habits.is_packing else NEVER_PACK
        host.driver = driver
        party = Party(
            introduction=config.introduction(),
            secret=SECRET,
            accepts=frozenset({SESSION}),
            versions=self.instance.versions or (VERSION_MIN, VERSION_MAX),
        )
        self.world.network.listeners[address_of(self.name)] = Listener(host, party)
        self.world.network.parties[host.name] = party
        process.at_death.append(partial(self.world.network.died, host))
        host.enter(host.driver.tick)
        return host

    def _start_rank(self, process: Process, rank: int, coordinator: Host) -> None:
        host = self._host(process, f"{self.name}/{rank}")
        pool = Pool(self.spec, rank)
        share = self.world.facts.pressure[0 if self.instance.is_source else 1]
        if share:
            pool.fill(share, host.chance)
        owner = Owner(host.name, process.life, partial(self._wake, host, rank), process.is_running)
        transport = SimTransport(self.world.fabric, owner, self.world.options.strength)
        config = RankConfig(self.name, self.epoch, rank, self.spec, FINGERPRINT, self.world.options.timings)
        pools = Pools(pool.memory, transport, STAGING_BYTES)
        driver = RankDriver(config, host, transport, pools)
        host.driver = driver
        host.after_call = partial(self.engine.look, rank)
        self.hosts[rank], self.drivers[rank] = host, driver
        self.pools[rank], self.transports[rank] = pool, transport
        self.world.watch.add(transport, pool)
        process.at_death.append(lambda: transport.die(self.instance.lingers))
        introductions = (config.introduction(NAME), self.world.network.parties[coordinator.name].introduction)
        join(host, coordinator, introductions, MEMBER_S)

    def _wake(self, host: Host, rank: int) -> None:
        host.process.later(POLL_S, self._poll, host, rank)

    def _poll(self, host: Host, rank: int) -> None:
        events = self.transports[rank].poll()
        if events:
            host.enter(self.drivers[rank].on_completions, events)

    # What the engine asks of its ranks.

    def send(self, rank: int, attempt: Attempt) -> Sending:
        """Begins the source's end on a rank."""
        prompt = attempt.source_prompt
        return self.drivers[rank].send(attempt.transfer, Digest(prompt.num_tokens, prompt.digest))

    def is_ungranted(self, job: Job) -> bool:
        """Whether some rank has not been given the grant of a transfer yet; an engine is not told."""
        for rank in job.ranks:
            found = self.drivers[rank].source.transfers.get(job.transfer)
            if rank not in job.outcomes and (found is None or found.record.state is SourceRankState.WAITING):
                return True
        return False

    def receive(self, rank: int, job: Job, tables: Mapping[int, Mapping[str, Ints]]) -> Receiving:
        """Begins the target's end on a rank, with the page tables that it is to pass on."""
        attempt = job.attempt
        prompt = attempt.target_prompt
        return self.drivers[rank].receive(
            Asked(
                transfer=attempt.transfer,
                source=job.wish.source,
                digest=Digest(prompt.num_tokens, prompt.digest),
                pages=tables,
                held=job.wish.held,
                source_dp=job.wish.source_dp,
                is_verified=job.wish.is_verified,
                fence=job.wish.fence,
            )
        )

    def drain(self) -> None:
        """The owner wants it to end when its work is done."""
        host = self.coordinator
        assert host is not None
        assert isinstance(host.driver, CoordinatorDriver)
        host.call(host.driver.drain, "told to")

    def decline(self, attempt: Attempt) -> None:
        """Turns a transfer down, on any rank."""
        rank = self.spec.layout.group(attempt.ends.target_dp)[0]
        source = self.known_as(attempt.ends.source)
        self.drivers[rank].decline(attempt.transfer, source, "no pages in time")

    def known_as(self, source: str) -> str:
        """What this instance calls a source: its name, or its address; not both, as it has one link to it."""
        chance = random.Random(f"{self.world.seed}/{self.name}/{source}")
        return address_of(source) if chance.random() < self.world.options.habits.address_share else source
