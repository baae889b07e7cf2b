"""One seed: its instances, network and transports, and the loop that runs until everything is settled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf

import numpy as np

from baton.plan.content import Bytes
from baton.plan.ownership import Spec
from baton.plan.tokens import Ints
from baton.protocol.messages import VERSION_MAX, VERSION_MIN
from baton.sim.content import SimPagePool
from baton.sim.core import Context, Options, SimProcess
from baton.sim.engines import SourceEngine, TargetEngine
from baton.sim.families import SimFamily
from baton.sim.instance import Incarnation
from baton.sim.network import Network
from baton.sim.router import SimAttempt, SimRouter
from baton.sim.transport import Fabric, SimCopy, SimTransport

CHECK_S = 0.01
"""How often the world checks whether everything is settled."""
SETTLE_S = 6.0
"""How long everything may take to settle after the last fault."""
STEPS_MAX = 400_000
VERSIONS = (VERSION_MIN, VERSION_MAX)


class SimInstance:
    """A name and an address, and the incarnation behind them; a new one starts when one has ended."""

    def __init__(self, world: World, name: str, spec: Spec, is_source: bool) -> None:
        self.world = world
        self.name = name
        self.spec = spec
        self.is_source = is_source
        self.versions = VERSIONS
        self.restart_s = 0.02
        self.taken_share = 0.0
        """The share of new page pools that other work takes."""
        self.lingers = False
        """Whether copies outlive the process that began them."""
        self.incarnation: Incarnation | None = None
        self.engine: SourceEngine | TargetEngine | None = None
        self.num_lives = 0
        self.died_s = -inf
        """When a process of it died last."""

    @property
    def processes(self) -> list[SimProcess]:
        """The processes of the present incarnation."""
        return self.incarnation.processes if self.incarnation else []

    def start(self) -> None:
        """Starts the next incarnation."""
        world = self.world
        self.num_lives += 1
        world.note(self.name, "start", detail=f"epoch {self.num_lives} {self.spec.layout}")
        incarnation = Incarnation(
            world, world.network, world.fabric, name=self.name, epoch=self.num_lives, spec=self.spec
        )
        engine_type = SourceEngine if self.is_source else TargetEngine
        engine = engine_type(incarnation, world.router)
        self.incarnation, self.engine = incarnation, engine
        incarnation.start(
            self.versions,
            self.taken_share,
            lingers=lambda: self.lingers,
            on_death=self._on_death,
            after_call=engine.look,
        )
        for rank, transport in incarnation.transports.items():
            world.observer.add(transport, incarnation.pools[rank])

    def arrive(self, attempt: SimAttempt) -> None:
        if self.engine is None or not self.engine.is_alive:
            self.world.router.leg_ended(attempt, f"{self.name} is down")
        else:
            self.engine.arrive(attempt)

    def abort(self, transfer: str, text: str) -> None:
        if self.engine is not None and self.engine.is_alive:
            self.engine.abort(transfer, text)

    def _on_death(self, incarnation: Incarnation) -> None:
        """Fails all legs at the first death, and restarts after the last."""
        engine = self.engine
        assert engine is not None
        if engine.is_alive:
            engine.is_alive = False
            self.died_s = self.world.schedule.now
            self.world.notify("on_death", incarnation)
            for attempt in [*(job.attempt for job in engine.jobs.values()), *engine.queue]:
                self.world.router.leg_ended(attempt, f"{self.name} died")
        if not any(process.is_alive for process in incarnation.processes):
            self.world.note(self.name, "ended")
            self.world.schedule.after(self.restart_s, self.start)


@dataclass(frozen=True, slots=True)
class CopyWrite:
    """A piece of a copy that is about to be written."""

    copy: SimCopy
    pool: SimPagePool
    """The target's pool."""
    buffer: str
    """The name of a buffer of the pool; empty for staging."""
    index: Ints
    source: SimPagePool
    source_buffer: str
    read: Ints


class PageObserver:
    """Finds the pages of copied bytes, and notifies the hooks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._pools: dict[str, SimPagePool] = {}
        self._names: dict[int, str] = {}
        """Names of pool buffers by address."""

    def add(self, transport: SimTransport, pool: SimPagePool) -> None:
        self._pools[transport.incarnation] = pool
        for name, raw in pool.memory.items():
            self._names[_address(raw)] = name

    def on_submit(self, copy: SimCopy) -> None:
        pool = self._pools[copy.batch.source.remote.incarnation]
        name = self._names.get(_address(copy.memory), "")
        if name and len(copy.read):
            copy.mark = int(pool.owners_of(name, copy.read[:1])[0])
        self.context.notify("on_submit", copy, pool, name)

    def on_write(self, copy: SimCopy, target: SimTransport, index: Ints, read: Ints) -> None:
        memory = target.regions.find(copy.batch.target.number)
        assert memory is not None, "it is about to be written"
        write = CopyWrite(
            copy=copy,
            pool=self._pools[target.incarnation],
            buffer=self._names.get(_address(memory.bytes), ""),
            index=index,
            source=self._pools[copy.batch.source.remote.incarnation],
            source_buffer=self._names.get(_address(copy.memory), ""),
            read=read,
        )
        self.context.note(target.node, "write", detail=f"{len(index)} bytes of {write.buffer or 'staging'}")
        self.context.notify("on_write", write)
        if write.buffer:
            np.add.at(write.pool.num_writes[write.buffer], index, 1)

    def on_end(self, copy: SimCopy, how: str) -> None:
        self.context.note(copy.sender.node, "copied", detail=f"{copy.ticket.number} {how}")
        self.context.notify("on_copy_end", copy, how)


def _address(raw: Bytes) -> int:
    return int(raw.__array_interface__["data"][0])


class DriverLog(logging.Handler):
    """Keeps the first record that drivers must not log.

    That is an exception that a driver confined to one transfer, or a peer that broke the protocol. A peer may
    seem to have broken it where frames are lost, duplicated or reordered.
    """

    LOGGER = "baton.session"
    CONFUSING = frozenset({"duplication", "echo", "loss", "reordering"})

    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._may_seem_broken = bool(faults & self.CONFUSING)

    def emit(self, record: logging.LogRecord) -> None:
        is_broken = "broke" in record.msg or record.msg.startswith("session with")
        if not self.text and (record.exc_info or (is_broken and not self._may_seem_broken)):
            self.text = logging.Formatter("%(message)s").format(record)

    def __enter__(self) -> DriverLog:
        logging.getLogger(self.LOGGER).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(self.LOGGER).removeHandler(self)


class World(Context):
    """All parts of one seed."""

    def __init__(
        self,
        seed: int,
        options: Options,
        family: SimFamily,
        *,
        is_scripted: bool = False,
        is_traced: bool = False,
    ) -> None:
        super().__init__(seed, options, is_traced=is_traced)
        self.is_scripted = is_scripted
        """Whether a scenario makes things go wrong, without faults."""
        self.network = Network(self)
        self.observer = PageObserver(self)
        self.fabric = Fabric(self.schedule, self.rng("copies"), self.observer, self._is_cut)
        self.instances: dict[str, SimInstance] = {}
        self.router = SimRouter(self, self.instances)
        for letter, specs in (("P", family.sources), ("D", family.targets)):
            for number, spec in enumerate(specs):
                name = f"{letter}{number}"
                self.instances[name] = SimInstance(self, name, spec, is_source=letter == "P")
        for _, fault in sorted(options.faults.items()):
            fault.install(self)

    def run(self) -> None:
        """Runs until everything is settled; raises Violation."""
        for instance in self.instances.values():
            instance.start()
        self._is_settled = False
        self.schedule.after(CHECK_S, self._check_settled)
        with DriverLog(frozenset(self.options.faults)) as log:
            while not self._is_settled and self.schedule.step():
                if self.violation is not None:
                    raise self.violation
                if log.text:
                    self.fail("escape", log.text)
                if self.schedule.num_done > STEPS_MAX:
                    self.fail("settles", f"still busy after {STEPS_MAX} steps")

    def _check_settled(self) -> None:
        options = self.options
        # A source without room takes one attempt after another, and each may wait in vain for its target.
        queue_s = len(self.router.attempts) * (options.timings.offer_s + options.timings.beat_s)
        is_idle = not self.router.num_waiting and not self.fabric.num_pending
        if self.are_faults_over() and is_idle and not self.unsettled():
            self.notify("on_settled")
            self._is_settled = True
        elif self.schedule.now > options.faults_s + SETTLE_S + queue_s:
            self.fail("settles", self.unsettled())
        else:
            self.schedule.after(CHECK_S, self._check_settled)

    def unsettled(self) -> str:
        """Describes the instances that are down and the transfers that have not ended."""
        texts = []
        for name, instance in sorted(self.instances.items()):
            engine = instance.engine
            if engine is None or instance.incarnation is None or not instance.incarnation.is_alive:
                texts.append(f"{name} is down")
                continue
            for _, job in sorted(engine.jobs.items()):
                texts.append(f"{name} has {job.transfer}: {job.describe()}")
            texts += [f"{name} has {attempt.transfer} waiting" for attempt in engine.queue]
        return "; ".join(texts)

    def _is_cut(self, sender: str, receiver: str) -> bool:
        return (sender.partition("/")[0], receiver.partition("/")[0]) in self.network.cuts
