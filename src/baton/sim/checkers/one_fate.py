"""When a process of an instance dies, all of them end soon."""

from __future__ import annotations

from baton.sim.checkers.base import Checker
from baton.sim.incarnation import Incarnation
from baton.sim.options import TIMINGS

END_S_MAX = TIMINGS.silence_s + 1.0


class OneFate(Checker):
    """Looks again a while after a death."""

    def died(self, incarnation: Incarnation) -> None:
        """A process is gone."""
        self.world.schedule.after(END_S_MAX, self._look, incarnation)

    def _look(self, incarnation: Incarnation) -> None:
        left = [process for process in incarnation.processes if process.is_alive]
        if any(process.is_stopped for process in left):
            self.world.schedule.after(END_S_MAX, self._look, incarnation)
        elif left:
            names = ", ".join(process.name for process in left)
            self.fail(f"{names} lived on for {END_S_MAX:.1f} s after another process of the instance died")


CHECKER = OneFate
