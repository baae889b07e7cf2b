"""The process from which those of RemoteEnds fork. It computes nothing, and has no thread when it forks."""

import gc
import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

from tests.transport.ends import open_end, serve


def fork_as_asked(control: socket.socket) -> None:
    """Until the parent hangs up; and in each fork, until its own pipe ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not asked:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(Connection(descriptors[0]), open_end(*json.loads(asked)))
            return
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    fork_as_asked(socket.socket(fileno=int(sys.argv[1])))
