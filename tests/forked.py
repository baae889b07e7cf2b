"""What a forked process does in the tests of the fork server."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from baton import settings
from baton.fork_server import FORK_SERVERS


def main(connection: Connection, behaviour: str) -> None:
    """Behaves as named."""
    match behaviour:
        case "tell":
            name = Path("/proc/self/comm").read_text()
            connection.send((dict(os.environ), os.getpid(), os.getsid(0), name))
        case "fail":
            raise ValueError("it cannot be")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "listen":
            connection.send(sorted(map(_kind, os.listdir("/proc/self/fd"))))
            try:
                connection.recv()
            except EOFError:
                return
        case "nest":
            FORK_SERVERS.fork_early(settings.rank_environment(1), ("sets_a_variable",))
            connection.send(bool(FORK_SERVERS._servers))
        case "linger":
            connection.send(os.getpid())
            threading.Event().wait()


def _kind(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""  # the listing's own
    return "file" if "/" in target else target.partition(":")[0]
