"""Time as a virtual machine's own processes have it: what others took of its processors does not count."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STEAL = 8


def stolen_s() -> float:
    """Seconds of processor time that this machine wanted and did not get, on all its processors, so far."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(first[_STEAL]) / os.sysconf("SC_CLK_TCK")


class Watch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started_s, self._stolen_s = time.monotonic(), stolen_s()

    def wall_s(self) -> float:
        return time.monotonic() - self._started_s

    def own_s(self) -> float:
        """Wall time without what was stolen meanwhile; the same on a machine of one's own."""
        return max(0.0, self.wall_s() - (stolen_s() - self._stolen_s))
