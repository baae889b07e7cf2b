"""An instance over all its lives: a name and an address, and whoever stands behind them now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.plan.ownership import Spec
from baton.sim.engines.source import SourceEngine
from baton.sim.engines.target import TargetEngine
from baton.sim.incarnation import Incarnation
from baton.sim.process import Process
from baton.sim.request import Attempt

if TYPE_CHECKING:
    from baton.sim.world import World


class Instance:
    """Starts an incarnation, and another when all of that one has ended."""

    def __init__(self, world: World, name: str, spec: Spec, is_source: bool) -> None:
        self.world = world
        self.name = name
        self.spec = spec
        self.is_source = is_source
        self.versions: tuple[int, int] | None = None
        self.restart_s = 0.02
        self.lingers = False
        """Whether copies outlive the process that began them."""
        self.incarnation: Incarnation | None = None
        self.num_lives = 0

    def start(self) -> None:
        """The next incarnation."""
        self.num_lives += 1
        self.world.note(self.name, "start", detail=f"epoch {self.num_lives} {self.spec.layout}")
        self.incarnation = Incarnation(self, self.num_lives)
        self.incarnation.start()

    @property
    def processes(self) -> list[Process]:
        """Those of the present incarnation."""
        return self.incarnation.processes if self.incarnation else []

    @property
    def engine(self) -> SourceEngine | TargetEngine | None:
        """The present engine."""
        return self.incarnation.engine if self.incarnation else None

    def arrive(self, attempt: Attempt) -> None:
        """A leg comes from the router."""
        engine = self.engine
        if engine is None or not engine.is_alive:
            self.world.router.leg_ended(attempt, f"{self.name} is down")
        else:
            engine.arrive(attempt)

    def process_died(self, incarnation: Incarnation) -> None:
        """A process is gone: the engine's loop is broken, and once all are gone a new life begins."""
        engine = incarnation.engine
        if engine.is_alive:
            engine.is_alive = False
            self.world.died(incarnation)
            for job in list(engine.jobs.values()):
                self.world.router.leg_ended(job.attempt, f"{self.name} died")
            for attempt in engine.queue:
                self.world.router.leg_ended(attempt, f"{self.name} died")
        if not any(process.is_alive for process in incarnation.processes):
            self.world.note(self.name, "ended")
            self.world.schedule.after(self.restart_s, self.start)
