"""Ports that a test names before anything listens there.

They lie below those that the kernel gives to outgoing connections and those that `baton up` and the library
of Mooncake choose, and each worker of pytest-xdist has a range of its own: between the look at a port and its
use nobody else takes it. A program that can say where it listens is given port 0 instead.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

FIRST, NUM_PORTS, NUM_WORKERS_MAX = 10_000, 300, 16


def ports_of(worker: str) -> range:
    """Of a worker by its name, "gw3"; without a name, of a run without workers."""
    index = int(worker.removeprefix("gw")) % (NUM_WORKERS_MAX - 1) + 1 if worker else 0
    return range(FIRST + index * NUM_PORTS, FIRST + (index + 1) * NUM_PORTS)


_ports = ports_of(os.environ.get("PYTEST_XDIST_WORKER", ""))
# Another run on this machine may have workers of the same names: it begins elsewhere.
_next = os.getpid() * 37 % NUM_PORTS


def free_port(count: int = 1) -> int:
    """The first of `count` neighbouring ports at which nothing listens; the next call names others."""
    global _next  # noqa: PLW0603
    for _ in range(NUM_PORTS):
        if _next + count > NUM_PORTS:
            _next = 0
        first = _ports[_next]
        if are_free(range(first, first + count)):
            _next += count
            return first
        _next += 1
    raise AssertionError(f"no {count} free ports in a row in {_ports}")


def are_free(ports: range) -> bool:
    with ExitStack() as probes:
        try:
            for port in ports:
                probes.enter_context(socket.socket()).bind(("", port))
        except OSError:
            return False
    return True
