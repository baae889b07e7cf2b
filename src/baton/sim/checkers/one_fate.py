"""When a process of an instance dies, all of them end soon."""

from __future__ import annotations

from baton.sim.checkers.base import Checker
from baton.sim.incarnation import Incarnation

END_S = 1.0
"""Beyond the time for which a link may be silent."""


class OneFate(Checker):
    """Looks again a while after a death."""

    @property
    def _end_s_max(self) -> float:
        return self.world.options.timings.silence_s + END_S

    def died(self, incarnation: Incarnation) -> None:
        """A process is gone."""
        self.world.schedule.after(self._end_s_max, self._look, incarnation)

    def _look(self, incarnation: Incarnation) -> None:
        left = [process for process in incarnation.processes if process.is_alive]
        if any(process.is_stopped for process in left):
            self.world.schedule.after(self._end_s_max, self._look, incarnation)
        elif left:
            names = ", ".join(process.name for process in left)
            self.fail(
                f"{names} lived on for {self._end_s_max:.1f} s after another process of the instance died"
            )


CHECKER = OneFate
