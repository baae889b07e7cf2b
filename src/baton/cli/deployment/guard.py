"""Ends the processes of a deployment whose parent was killed, and removes its folder.

Run as a script, with the folder as its argument and process ids on stdin, a line each. Nothing happens until
stdin ends, which is when the parent does, however it does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from time import monotonic

END_S_MAX = 20.0
KILL_S_MAX = 10.0


def main() -> None:
    """Waits for the parent's end, then for its children's."""
    # What ends the parent's terminal or session must not end this.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handles = []
    for line in sys.stdin:
        # By handle and not by number, which another process may have by the time that it matters.
        with suppress(OSError):
            handles.append(os.pidfd_open(int(line)))
    for number, limit_s in ((signal.SIGINT, END_S_MAX), (signal.SIGKILL, KILL_S_MAX)):
        _signal(handles, number)
        _wait(handles, limit_s)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def _signal(handles: list[int], number: signal.Signals) -> None:
    for handle in handles:
        with suppress(OSError):
            signal.pidfd_send_signal(handle, number)


def _wait(handles: list[int], limit_s: float) -> None:
    """A handle is readable once its process has ended."""
    stop_s, waiting = monotonic() + limit_s, set(handles)
    while waiting and monotonic() < stop_s:
        ended, _, _ = select.select(list(waiting), [], [], max(0.0, stop_s - monotonic()))
        waiting.difference_update(ended)


if __name__ == "__main__":
    main()
