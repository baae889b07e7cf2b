"""A process: alive, stopped or gone, with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.sim.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock that is off by a constant and runs a little fast or slow."""

    schedule: Schedule
    offset_s: float = 0.0
    rate: float = 1.0

    def now(self) -> float:
        """What it shows."""
        return self.offset_s + self.schedule.now * self.rate

    def when(self, shown: float) -> float:
        """The moment of the world at which it shows this."""
        return (shown - self.offset_s) / self.rate


@dataclass(slots=True, eq=False)
class Process:
    """One process of an instance; what is meant for a stopped one waits until it goes on."""

    name: str
    instance: str
    epoch: int
    clock: Clock
    is_alive: bool = True
    is_stopped: bool = False
    stopped_s: float = float("-inf")
    """Until when it was last stopped."""
    at_death: list[Callable[[], None]] = field(default_factory=list)
    _backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def do(self, act: Callable[..., None], *args: Any) -> None:
        """Does something in this process: now, when it goes on, or never."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._backlog.append((act, args))
        else:
            act(*args)

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Does something in this process after a while."""
        self.clock.schedule.after(delay_s, self.do, act, *args)

    @property
    def life(self) -> str:
        """The incarnation that it belongs to."""
        return f"{self.instance}#{self.epoch}"

    def is_running(self) -> bool:
        """Whether anything of it runs now."""
        return self.is_alive and not self.is_stopped

    def stop(self) -> None:
        """Nothing of it runs any more until it goes on."""
        self.is_stopped = True
        self.stopped_s = float("inf")

    def go_on(self) -> None:
        """Does what has gathered."""
        self.is_stopped = False
        self.stopped_s = self.clock.schedule.now
        backlog, self._backlog = self._backlog, []
        for act, args in backlog:
            self.do(act, *args)

    def kill(self) -> None:
        """The process is gone, with everything in it."""
        if not self.is_alive:
            return
        self.is_alive = False
        for act in self.at_death:
            act()
