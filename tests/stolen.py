"""Time as a virtual machine's own processes have it: what others took of its processors does not count."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STEAL = 8


def stolen_s() -> float:
    """Seconds that this machine wanted and did not get so far, on average over its processors."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(first[_STEAL]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


class Watch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started_s, self._stolen_s = time.monotonic(), stolen_s()

    def wall_s(self) -> float:
        return time.monotonic() - self._started_s

    def taken_s(self) -> float:
        """What others took meanwhile."""
        return stolen_s() - self._stolen_s

    def own_s(self) -> float:
        """Wall time without what was taken; the same on a machine of one's own."""
        return self.wall_s() - self.taken_s()

    def share(self) -> float:
        """What others took, as a share of the machine."""
        return self.taken_s() / max(1e-3, self.wall_s())
