"""Where a driver lives: the ports of one process, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.protocol.messages import AnyMessage
from baton.session.ports import Driver
from baton.sim.process import Process
from baton.sim.schedule import Entry

if TYPE_CHECKING:
    from baton.sim.links import Cord
    from baton.sim.world import World

JOB_S = 0.0002
POST_S = 0.00002


class Host:
    """One driver's ports."""

    def __init__(self, world: World, process: Process, name: str, chance: random.Random) -> None:
        self.world = world
        self.process = process
        self.name = name
        self.chance = chance
        self.driver: Driver | None = None
        self.after_call: Callable[[], None] | None = None
        """What looks whether something changed."""
        self.cords: dict[int, Cord] = {}
        self._num_links = 0
        self._posted_s = 0.0
        self._tick: Entry | None = None
        self._tick_at = 0.0

    def now(self) -> float:
        """The clock of this process."""
        return self.process.clock.now()

    def token(self, num_bytes: int) -> bytes:
        """Random bytes of this host's own stream."""
        return self.chance.randbytes(num_bytes)

    def dial(self, address: str, instance: str) -> int:
        """Begins a session link."""
        number = self.new_link()
        self.world.network.dial(self, number, address, instance)
        return number

    def send(self, link: int, message: AnyMessage) -> None:
        """Sends on a link that is there."""
        cord = self.cords.get(link)
        if cord is not None:
            cord.send(message)

    def hang_up(self, link: int) -> None:
        """Ends a link from this side."""
        cord = self.cords.pop(link, None)
        if cord is not None:
            cord.hang_up()

    def run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        """Runs a job a little later, and the rest a little after that."""
        self.process.later(JOB_S * self.chance.random(), self._run, job, then)

    def look_up(self, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Asks the registry."""
        self.world.registry.look_up(self, instance, then)

    def post(self, call: Callable[[], None]) -> None:
        """Calls back soon, in the order of the posts."""
        schedule = self.world.schedule
        self._posted_s = max(self._posted_s, schedule.now + POST_S * self.chance.random())
        schedule.at(self._posted_s, self.process.do, self.enter, call)

    def serving(self) -> None:
        """The instance is complete: its coordinator may be found."""
        if self.name in self.world.network.parties:
            self.world.registry.register(self)

    def end(self, cause: str) -> None:
        """The process ends once the driver has returned."""
        self.world.note(self.name, "end", detail=cause)
        self.process.later(0.0, self.process.kill)

    def new_link(self) -> int:
        """A number that no link of this host had."""
        self._num_links += 1
        return self._num_links

    def enter(self, act: Callable[..., Any], *args: Any) -> None:
        """Calls into the driver, then asks when it wants to be called again."""
        act(*args)
        if self.after_call is not None:
            self.after_call()
        assert self.driver is not None
        wanted = self.driver.next_tick()
        if wanted is None:
            self._disarm()
            return
        if self._tick is not None and self._tick.act is not None and self._tick_at == wanted:
            return
        self._disarm()
        self._tick_at = wanted
        # Not before the driver's own clock shows it, whatever was lost in the conversion.
        moment = self.process.clock.when(wanted) + 1e-9
        self._tick = self.world.schedule.at(moment, self.process.do, self._ticked)

    def call(self, act: Callable[..., Any], *args: Any) -> None:
        """Calls into the driver if its process can be called."""
        self.process.do(self.enter, act, *args)

    def _ticked(self) -> None:
        self._tick = None
        assert self.driver is not None
        self.enter(self.driver.tick)

    def _disarm(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        try:
            result = job()
        except Exception as error:
            result = error
        self.process.later(JOB_S * self.chance.random(), self.enter, then, result)
