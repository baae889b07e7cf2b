"""Whether two processes run on one kernel, and so may reach each other's memory."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_kernel() -> bytes:
    """What the processes of one running kernel have in common; empty where that cannot be known."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def is_this_kernel(other: bytes) -> bool:
    """Whether a process that names its kernel so may run on this one."""
    mine = this_kernel()
    return not mine or not other or mine == other
