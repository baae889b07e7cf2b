"""A process that has imported all that a rank needs, and from which ranks fork.

An import of PyTorch takes seconds of a core, a fork next to nothing. Nothing is computed here and no device
is touched, so that a fork has nothing to trip over. The cradle ends with its parent, and every rank with the
cradle.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

import baton.engine.worker  # noqa: F401 - this is what it is for
from baton import settings
from baton.engine.lineage import die_with
from baton.engine.rank.birth import FATE, NUM_DESCRIPTORS, Birth

_NAME = 15  # PR_SET_NAME
_libc = ctypes.CDLL(None)


class Cradle:
    """Forks ranks as asked, and tells of their ends."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = os.pidfd_open(parent)
        self._wake, self._rung = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fates: dict[int, int] = {}

    def run(self) -> None:
        """Until the parent hangs up or ends."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._rung, warn_on_full_buffer=False)
        while True:
            watched: list[socket.socket | int] = [self._control, self._parent, self._wake]
            ready, _, _ = select.select(watched, [], [])
            if self._parent in ready:
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in ready:
                asked, descriptors, _, _ = socket.recv_fds(self._control, 1, NUM_DESCRIPTORS)
                if not asked:
                    return
                self._fork(*descriptors)

    def _fork(self, pipe: int, errors: int, fate: int) -> None:
        cradle = os.getpid()
        with warnings.catch_warnings():
            # Of threads: what runs here besides this one is a BLAS pool that knows of forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            die_with(cradle)
            self._leave()
            os.close(fate)
            _live(pipe, errors)
        self._fates[pid] = fate
        self._tell(fate, pid)
        os.close(pipe)
        os.close(errors)

    def _leave(self) -> None:
        """In a forked rank: the cradle's own affairs are none of its."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (self._parent, self._wake, self._rung, *self._fates.values()):
            os.close(descriptor)
        os.setsid()  # Ctrl-C is for the parent, which ends its ranks in order

    def _reap(self) -> None:
        while self._fates:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fate = self._fates.pop(pid)
            self._tell(fate, os.waitstatus_to_exitcode(status))
            os.close(fate)

    @staticmethod
    def _tell(fate: int, what: int) -> None:
        with suppress(BrokenPipeError):  # nobody wants to know
            os.write(fate, FATE.pack(what))


def _live(pipe: int, errors: int) -> NoReturn:
    """The whole life of a forked rank."""
    for standard in (1, 2):
        os.dup2(errors, standard)
    os.close(errors)
    try:
        connection = Connection(pipe)
        birth = msgspec.msgpack.decode(connection.recv_bytes(), type=Birth)
        settings.take_environment(birth.environment)
        _libc.prctl(_NAME, birth.name.encode()[:15])
        importlib.import_module(birth.module).main(connection, *birth.words)
    finally:
        error = sys.exception()
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1 if error else 0)  # threads of libraries must not keep an ended rank alive


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    Cradle(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
    os._exit(0)
