"""A process that has imported everything its children need, from which they are forked.

Importing PyTorch takes seconds of a core, a fork next to nothing. The fork server computes nothing and
touches no device, so that a fork is safe. It ends with its parent, and every forked process is signalled when
the server ends. An instance forks its workers from one, and `baton up` its instances from another.

The parent sends three descriptors for each process: its pipe, the file for its output, and the write end of
its status pipe. The first message on the process's pipe is a SpawnRequest. The status pipe carries the pid,
and at the end the exit code. `python -m baton.fork_server` runs the server; the classes above it are the
parent's side.

A command that is about to import the same libraries for itself calls `ForkServerPool.fork_early` first: the
server is then a fork of the command, and the libraries are imported once instead of twice."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, NoReturn

import msgspec

from baton import settings
from baton.errors import LAST_WORDS, EngineError

_STATUS = struct.Struct("<i")
"""On the status pipe: first the pid, then the exit code, negative for a signal."""
_NUM_DESCRIPTORS = 3
_LIBRARIES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA", "HF_")
_IMPORT_VARIABLES = ("LD_", "PYTHON", *_LIBRARIES)
"""Variables with these prefixes are read while libraries are imported: other values need another server."""
_NOT_READ = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
"""Not these: every worker sets its number of threads itself, and PyTorch sets the last one to compile."""
_set_by_imports: set[str] = set()
"""Nor these, which libraries set themselves while `_import` ran, as scikit-learn does KMP_INIT_AT_FORK."""
_SERVERS_MAX = 2
_END_S_MAX = 1.0
_ERROR = re.compile(
    r"^baton: |^([\w.]+\.)?[A-Z]\w*(Error|Exception|Interrupt)(: |$)|^Fatal |^terminate called|"
    r"\b(ERROR|CRITICAL|FATAL)\b|\"level\": ?\"(error|critical)\""
)
"""Messages of commands, last lines of tracebacks, crashes, log lines."""
_WARNING = re.compile(r"\b\w*Warning: |\bWARN(ING)?\b|\"level\": ?\"warning\"")
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SET_NAME = 15  # PR_SET_NAME
_SERVER_NAME = "baton fork"
_libc = ctypes.CDLL(None)


def describe_exit(code: int | None) -> str:
    """How a process ended; None: it has not ended, but its pipe was closed."""
    if code is None:
        return "closed its output"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """In a child right after its fork: the parent's end sends this signal."""
    _libc.prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


class SpawnRequest(msgspec.Struct, frozen=True):
    """What a forked process runs."""

    name: str
    module: str
    """Its `main` is called with the pipe and the arguments."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    death_signal: int = signal.SIGKILL
    """What the end of the fork server sends it."""


class _LogRecord(msgspec.Struct):
    message: str


def last_error(lines: Sequence[str]) -> str:
    """Of the output of a process that ended: its last error, or else its last line that is no warning."""
    errors, others, is_quoted = [], [], False
    for line in lines:
        is_warning = _WARNING.search(line) is not None
        if _ERROR.search(line):
            errors.append(line)
        elif line.strip() and not is_warning and not (is_quoted and line.startswith(" ")):
            others.append(line)
        is_quoted = is_warning  # the next line is the source that it is about
    return _message((errors or others or ["no message"])[-1].strip())


def _message(line: str) -> str:
    """Of a log line in JSON, what it says."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=_LogRecord).message
    return line


def ended_error(name: str, code: int | None, output: IO[bytes]) -> EngineError:
    """Says that a process ended, with the last error of its output."""
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return EngineError(f"{name} {describe_exit(code)}{LAST_WORDS}{last_error(lines)}")


class _Forked(ABC):
    """A process that was forked; its methods are those of `subprocess.Popen`."""

    _pidfd: int
    returncode: int | None = None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutExpired."""

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait_readable(descriptor: int, pid: int, timeout: float | None) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(None if timeout is None else timeout * 1e3):
        raise subprocess.TimeoutExpired(f"process {pid}", timeout or 0.0)


class ForkedProcess(_Forked):
    """A process forked from a server."""

    def __init__(self, server: ForkServer, status: int) -> None:
        self._server = server  # a server without references ends, and all its processes with it
        self._status = status
        self._lock = threading.Lock()
        pid = self._read_status()
        if pid is None:
            raise server.ended_error()
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __del__(self) -> None:
        for descriptor in (self._status, getattr(self, "_pidfd", -1)):
            with suppress(OSError):
                os.close(descriptor)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            _wait_readable(self._status, self.pid, timeout)
        with self._lock:
            if self.returncode is None:
                code = self._read_status()
                if code is None:
                    # The server was killed; the process was signalled, and may take its time.
                    _wait_readable(self._pidfd, self.pid, timeout)
                    code = -signal.SIGKILL
                self.returncode = code
            return self.returncode

    def _read_status(self) -> int | None:
        raw = os.read(self._status, _STATUS.size)
        return _STATUS.unpack(raw)[0] if raw else None


class _OwnFork(_Forked):
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._pidfd)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            _wait_readable(self._pidfd, self.pid, timeout)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """A running fork server with one environment and the modules that it has imported."""

    def __init__(
        self, environment: dict[str, str], modules: Sequence[str], *, is_own_fork: bool = False
    ) -> None:
        """Starts a new interpreter, or forks this process, which has the environment and the modules."""
        self.modules = frozenset(modules)
        self._control, theirs = socket.socketpair()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._process: subprocess.Popen[bytes] | _OwnFork
        with theirs:
            if is_own_fork:
                self._process = self._fork(theirs)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "baton.fork_server", str(theirs.fileno()), str(os.getpid()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _fork(self, theirs: socket.socket) -> _OwnFork:
        parent = os.getpid()
        sys.stdout.flush()
        pid = _fork_quietly()
        if pid:
            return _OwnFork(pid)
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for standard, descriptor in enumerate((null, self._output.fileno(), self._output.fileno())):
                os.dup2(descriptor, standard)
            for descriptor in (null, self._output.fileno(), self._control.detach()):
                os.close(descriptor)
            _libc.prctl(_SET_NAME, _SERVER_NAME.encode())
            _Server(theirs, parent).run()
        finally:
            os._exit(1 if sys.exception() else 0)

    def __del__(self) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the server, even while it imports, and every process forked from it."""
        self._control.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S_MAX)
        self._output.close()

    def spawn(self, pipe: int, output: int) -> ForkedProcess:
        """Forks a process, which gets copies of both descriptors."""
        status, theirs = os.pipe()
        try:
            with suppress(ConnectionError):  # a server that is gone sends no pid
                socket.send_fds(self._control, [b"\0"], [pipe, output, theirs])
        finally:
            os.close(theirs)
        return ForkedProcess(self, status)

    def run(self, request: SpawnRequest, output: int) -> ForkedProcess:
        """Forks a process that reads nothing more from its pipe than the request."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self.spawn(theirs.fileno(), output)
        with Connection(ours.detach()) as connection, suppress(OSError):  # one that is gone says so itself
            connection.send_bytes(msgspec.msgpack.encode(request))
        return process

    def ended_error(self) -> EngineError:
        """Says that the server ended, with its last error."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S_MAX)
        return ended_error("the fork server", self._process.returncode, self._output)


class ForkServerPool:
    """The fork servers of this process, one for each environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
        self.imported_with: frozenset[tuple[str, str]] | None = None
        """Where this process was forked from a server: the variables that its modules were imported with."""

    def get(self, environment: dict[str, str], modules: tuple[str, ...]) -> ForkServer:
        """A server for processes with this environment, which has imported these modules."""
        key = _read_at_import(environment)
        with self._lock:
            server = self._servers.pop(key, None)
            if server is None or not server.is_alive or not server.modules.issuperset(modules):
                server = ForkServer(environment, modules)
            self._servers[key] = server
            while len(self._servers) > _SERVERS_MAX:
                del self._servers[next(iter(self._servers))]
            return server

    def fork_early(self, environment: dict[str, str], modules: tuple[str, ...]) -> None:
        """Imports what children need, and forks this process into a server of that environment.

        Does nothing where a fork would not be safe or not have the environment: beside other threads, or
        after the modules were imported, unless they were imported with it. `get` starts a new interpreter
        then.
        """
        variables = _read_at_import(environment)
        if threading.active_count() > 1:
            return
        if self.imported_with != variables and any(module in sys.modules for module in modules):
            return
        settings.set_variables({name: environment[name] for name in filter(_is_read_at_import, environment)})
        _import(modules)
        server = ForkServer(environment, modules, is_own_fork=True)
        with self._lock:
            self._servers[variables] = server

    def close(self) -> None:
        """Ends all servers, so that nothing outlives this process even for a moment."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def become_child(self, imported_with: frozenset[tuple[str, str]]) -> None:
        """In a forked process: what it can fork from, and that the servers of its parent are not its own."""
        self._lock = threading.Lock()
        self._servers = {}
        self.imported_with = imported_with


class _Server:
    """The server's own process: forks on request and reports exit codes."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._imported_with = _read_at_import(settings.environment())
        self._control = control
        self._parent = os.pidfd_open(parent)
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._statuses: dict[int, int] = {}
        """Status descriptors by pid."""

    def run(self) -> None:
        """Serves until the parent closes its end or ends."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        while True:
            watched: list[socket.socket | int] = [self._control, self._parent, self._wake]
            ready, _, _ = select.select(watched, [], [])
            if self._parent in ready:
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in ready:
                request, descriptors, _, _ = socket.recv_fds(self._control, 1, _NUM_DESCRIPTORS)
                if not request:
                    return
                self._fork(*descriptors)

    def _fork(self, pipe: int, output: int, status: int) -> None:
        server = os.getpid()
        pid = _fork_quietly()
        if pid == 0:
            die_with(server)
            self._close_in_child()
            os.close(status)
            FORK_SERVERS.become_child(self._imported_with)
            _run_forked(pipe, output, server)
        self._statuses[pid] = status
        _write_status(status, pid)
        os.close(pipe)
        os.close(output)

    def _close_in_child(self) -> None:
        """Closes the server's descriptors in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (self._parent, self._wake, self._waker, *self._statuses.values()):
            os.close(descriptor)
        os.setsid()  # Ctrl-C is for the parent, which ends its workers in order

    def _reap(self) -> None:
        while self._statuses:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            status = self._statuses.pop(pid)
            _write_status(status, os.waitstatus_to_exitcode(wait_status))
            os.close(status)


def _read_at_import(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    ignored = _set_by_imports.union(_NOT_READ)
    return frozenset(
        item for item in environment.items() if _is_read_at_import(item[0]) and item[0] not in ignored
    )


def _is_read_at_import(name: str) -> bool:
    return name.startswith(_IMPORT_VARIABLES)


def _import(modules: Iterable[str]) -> None:
    before = settings.environment()
    for module in modules:
        importlib.import_module(module)
    now = settings.environment()
    _set_by_imports.update(name for name, value in now.items() if before.get(name) != value)
    gc.collect()
    gc.freeze()


def _fork_quietly() -> int:
    with warnings.catch_warnings():
        # About threads: the only other ones are a BLAS pool that handles forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _write_status(status: int, value: int) -> None:
    with suppress(BrokenPipeError):  # the parent dropped the process
        os.write(status, _STATUS.pack(value))


def _run_forked(pipe: int, output: int, server: int) -> NoReturn:
    """The whole life of a forked process."""
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    # The server may be a fork of a command that logs as JSON; a command that does so will say it again.
    sys.stderr, sys.excepthook = sys.__stderr__, sys.__excepthook__
    threading.excepthook = threading.__excepthook__
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    code: object = 1
    try:
        connection = Connection(pipe)
        request = msgspec.msgpack.decode(connection.recv_bytes(), type=SpawnRequest)
        settings.take_environment(request.environment)
        tempfile.tempdir = None  # found again, in this environment
        _libc.prctl(_SET_NAME, request.name.encode()[:15])
        if request.death_signal == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a server in the background ignores it
        die_with(server, signal.Signals(request.death_signal))
        importlib.import_module(request.module).main(connection, *request.arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        error = sys.exception()
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        FORK_SERVERS.close()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        # Threads of libraries must not keep an ended process alive.
        os._exit(code if isinstance(code, int) else 1)


FORK_SERVERS = ForkServerPool()
"""Of this process."""
atexit.register(FORK_SERVERS.close)


def main(control: int, parent: int, modules: Sequence[str]) -> NoReturn:
    """Runs a server in a process of its own."""
    _import(modules)
    _Server(socket.socket(fileno=control), parent).run()
    os._exit(0)


if __name__ == "__main__":
    # As the module that its children import, not as a second copy of it.
    importlib.import_module("baton.fork_server").main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
