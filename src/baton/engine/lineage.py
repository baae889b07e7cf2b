"""For a process right after its fork: what its parent's end is to it."""

from __future__ import annotations

import ctypes
import os
import signal

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)


def interrupt_with(parent: int) -> None:
    """Its parent's end, however it comes, interrupts it."""
    # Started in the background, the parent ignores interrupts, and so would what it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _follow(parent, signal.SIGINT)


def die_with(parent: int) -> None:
    """Its parent's end is its own."""
    _follow(parent, signal.SIGKILL)


def _follow(parent: int, by: signal.Signals) -> None:
    _libc.prctl(_PARENT_DEATH, by)
    if os.getppid() != parent:
        os._exit(1)
