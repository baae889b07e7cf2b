"""Starts the processes of RemoteEnds: forks of one process that has imported what an end needs.

An interpreter with these imports takes 0.4 s of a core to start, and the suite needs some five hundred; a
fork takes next to nothing. Run as a module, this is that process; it has no other thread when it forks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class ForkedProcess:
    """A forked process, as its grandparent sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def close(self) -> None:
        os.close(self._pidfd)


class ForkServer:
    """The server of this process; it ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.transport.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                start_new_session=True,
            )
        atexit.register(self._end)

    def start(self, pipe: socket.socket, *arguments: Any) -> ForkedProcess:
        """A process that opens an end with these arguments and serves it through the pipe."""
        socket.send_fds(self._control, [json.dumps(arguments).encode()], [pipe.fileno()])
        return ForkedProcess(int(self._control.recv(64)))

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def fork_server() -> ForkServer:
    return ForkServer()


def serve_forks(control: socket.socket) -> None:
    """Forks for each request until the parent hangs up; each fork serves an end until its pipe closes."""
    from tests.transport.ends import open_end, serve  # ends imports this module

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the server does not wait for its children
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not request:
            return
        arguments = json.loads(request)
        if arguments[0] == "cuda_ipc":
            importlib.import_module("baton.transport.cuda_ipc.device")  # torch, once for all children
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(Connection(descriptors[0]), open_end(*arguments))
            return
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
