"""Shared memory between processes of one host."""

from baton.transport.shm.transport import CONFIG, TRANSPORT

__all__ = ["CONFIG", "TRANSPORT"]
