"""Child processes: one way to start, read, restart and end them.

`ChildProcess` is one process. Threads read its stdout and stderr, so a child never blocks on a full pipe; the
last lines are kept and quoted when it ends early. A parent can wait for a ready line ("serving at URL"), or
exchange JSON lines with it over stdin and stdout.

`Supervisor` keeps named services running. It restarts a service that ends, on the same port and with growing
pauses, and gives up when one ends too often, ends before it was ever ready, or exits with code 2 (misuse).

A service that imports for seconds is forked from a process that has the modules already (fork_server.py).

No child outlives its parent. The kernel signals a child when the thread that started it ends
(PR_SET_PDEATHSIG), so the thread of a supervised service lives as long as the service. If the parent of a
supervisor is killed, a guard process kills the services that ignore that signal, and removes the folder of
those that need one.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, Any, Self
from urllib.parse import urlsplit

from baton import settings
from baton.errors import BatonError, ConfigError, ProcessError
from baton.fork_server import (
    FORK_SERVERS,
    ForkedProcess,
    ForkServer,
    SpawnRequest,
    describe_exit,
    die_with,
    last_error,
)
from baton.settings import Tls

ANSWER_S_MAX = 180.0
END_S_MAX = 10.0
NUM_LINES_KEPT = 20
NUM_LINES_UNREAD_MAX = 10_000
LAST_LINE = "| "
"""Before each of the last lines of a program that has ended."""
PORTS = range(18_000, 32_000)
"""Below those that the kernel gives to outgoing connections: a program may take minutes to listen."""
REPLY = "baton-reply "
"""Starts a JSON line from a child: libraries print to stdout too."""

RESTARTS_MAX = 3
RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.25
"""Before the second restart within a minute; before the third it is three times as long."""
DRAIN_S_MAX = 45.0
"""How long a service may take to end after SIGTERM: instances finish the requests they have."""
GUARD_S_MAX = 60.0


def free_port(count: int = 1, taken: Collection[int] = ()) -> int:
    """The first of `count` consecutive ports that are free now and not `taken`.

    For programs that must be told their port: the others listen on port 0.
    """
    for _ in range(1000):
        first = random.SystemRandom().choice(PORTS)
        ports = range(first, first + count)
        if not any(port in taken for port in ports) and all(map(_is_free, ports)):
            return first
    raise ProcessError(f"no {count} free ports in a row between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def baton_command(*arguments: str) -> list[str]:
    """The argv of a `baton` command in this Python."""
    return [sys.executable, "-m", "baton", *arguments]


def fetch_health(url: str, timeout_s: float = 5.0, tls: Tls | None = None) -> tuple[bool, bytes]:
    """Whether /health answers 200, and its body; a server that cannot be reached is not healthy.

    A router that serves and cannot hand over is not either: whoever starts a deployment waits for all of it.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    if tls is not None:
        context = tls.dialling()
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=context
        )
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read()
        return response.status == 200 and _status_word(body) != "degraded", body
    except (OSError, http.client.HTTPException):
        return False, b""
    finally:
        connection.close()


def _status_word(body: bytes) -> object:
    """The status that a body of /health gives; None where it gives none, as vLLM's, which is empty."""
    try:
        health = json.loads(body)
    except ValueError:
        return None
    return health.get("status") if isinstance(health, dict) else None


def reply(value: Any) -> None:
    """In a child: sends a JSON value to the parent, which reads it with `ChildProcess.receive`."""
    sys.stdout.write(REPLY + json.dumps(value) + "\n")
    sys.stdout.flush()


def serve_calls(target: object, lines: Iterable[str]) -> None:
    """In a child: answers the calls of `ChildProcess.begin` with methods of an object."""
    for line in lines:
        method, *arguments = json.loads(line)
        try:
            reply({"answer": getattr(target, method)(*arguments)})
        except BatonError as error:
            reply({"error": str(error)})


def _follow_parent(parent: int, number: signal.Signals) -> None:
    # A parent in the background may ignore SIGINT, and so would the child.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent, number)


class ChildProcess:
    """A process in a session of its own: Ctrl-C reaches only the parent, which ends its children in order."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        has_stdin: bool = False,
        death_signal: signal.Signals = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
        on_line: Callable[[str], None] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Starts it. `on_line` gets every line of stdout and stderr, on a thread of this object.

        With a fork server it is the `baton` command with these words, and has one pipe for both outputs.
        """
        self.name = name
        self._on_line = on_line
        self._unread: deque[str] = deque(maxlen=NUM_LINES_UNREAD_MAX)
        self._tail: deque[str] = deque(maxlen=NUM_LINES_KEPT)
        self._changed = threading.Condition()
        self._is_stdout_open = True
        self.stdin: IO[bytes] | None = None
        self.popen: subprocess.Popen[bytes] | ForkedProcess
        if fork_server is not None:
            request = SpawnRequest(
                f"baton {name}",
                "baton.__main__",
                tuple(argv),
                dict(env or settings.environment()),
                death_signal,
            )
            reading, writing = os.pipe()
            pipes = [os.fdopen(reading, "rb")]
            try:
                self.popen = fork_server.run(request, writing)
            finally:
                os.close(writing)
        else:
            parent = os.getpid()
            popen = self.popen = subprocess.Popen(
                list(argv),
                env=env,
                stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: _follow_parent(parent, death_signal),  # noqa: PLW1509 - system calls only
                pass_fds=pass_fds,
                start_new_session=True,
            )
            assert popen.stdout is not None
            assert popen.stderr is not None
            self.stdin, pipes = popen.stdin, [popen.stdout, popen.stderr]
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, index == 0), daemon=True, name=f"{name} output")
            for index, pipe in enumerate(pipes)
        ]
        for thread in self._readers:
            thread.start()

    def _read(self, pipe: IO[bytes], is_stdout: bool) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip()
                if not line:
                    continue
                with self._changed:
                    if is_stdout:
                        self._unread.append(line)
                    if not line.startswith(REPLY):
                        self._tail.append(line)
                    self._changed.notify_all()
                if self._on_line is not None:
                    self._on_line(line)
        if is_stdout:
            with self._changed:
                self._is_stdout_open = False
                self._changed.notify_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    @property
    def last_error(self) -> str:
        """The last error that it printed, as far as its last lines go."""
        return last_error(self._tail)

    @property
    def last_lines(self) -> list[str]:
        """The last lines that it printed, as far as they are kept."""
        return list(self._tail)

    def cpu_s(self) -> float:
        """Processor time of all its threads; 0 after it has ended."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """Raises ProcessError if it has ended."""
        if not self.is_running:
            raise self._ended()

    def _ended(self) -> ProcessError:
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(END_S_MAX)
        self._join_readers()
        return ProcessError(f"{self.name} {describe_exit(self.popen.returncode)}: {self.last_error}")

    def _join_readers(self) -> None:
        # A grandchild that inherited the pipe may keep it open, hence the limit.
        for thread in self._readers:
            if thread is not threading.current_thread():
                thread.join(1.0)

    def read_line(self, timeout_s: float = ANSWER_S_MAX) -> str:
        """The next line of stdout."""
        line = self._next_line(monotonic() + timeout_s)
        if line is None:
            raise ProcessError(f"{self.name} printed nothing for {timeout_s:g} s; {self.last_error}")
        return line

    def wait_line(self, prefix: str, timeout_s: float = ANSWER_S_MAX) -> str:
        """The rest of the next line of stdout with this prefix."""
        limit_s = monotonic() + timeout_s
        while (line := self._next_line(limit_s)) is not None:
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        raise ProcessError(f"{self.name} did not print {prefix!r} within {timeout_s:g} s; {self.last_error}")

    def _next_line(self, limit_s: float) -> str | None:
        """None when the time is up; raises if the process closed its stdout."""
        with self._changed:
            while not self._unread and self._is_stdout_open:
                if not self._changed.wait(max(0.0, limit_s - monotonic())):
                    return None
            if self._unread:
                return self._unread.popleft()
        raise self._ended()

    def wait_healthy(self, url: str, timeout_s: float = 300.0) -> None:
        """Returns once /health of this process answers 200."""
        limit_s = monotonic() + timeout_s
        while monotonic() < limit_s:
            self.check()
            if fetch_health(url)[0]:
                return
            self.wait(0.1)
        raise ProcessError(f"{self.name} at {url} was not ready within {timeout_s:g} s; {self.last_error}")

    def send(self, value: Any) -> None:
        """Writes one JSON line to its stdin."""
        assert self.stdin is not None
        try:
            self.stdin.write(json.dumps(value).encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, timeout_s: float = ANSWER_S_MAX) -> Any:
        """The next value that the child sent with `reply`."""
        return json.loads(self.wait_line(REPLY, timeout_s))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the object that the child serves with `serve_calls`."""
        self.begin(method, *arguments)
        return self.answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; `answer` returns its result."""
        self.send([method, *arguments])

    def answer(self) -> Any:
        """The result of the oldest call without one."""
        received = self.receive()
        if "error" in received:
            raise ProcessError(f"{self.name}: {received['error']}")
        return received["answer"]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended in time."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it at once, stopped or not."""
        self.popen.kill()
        self.popen.wait(END_S_MAX)

    def close_stdin(self) -> None:
        """A child that reads its stdin ends when it is closed."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.close()

    def close(self, grace_s: float = END_S_MAX) -> None:
        """Ends it: by the end of its stdin, or by SIGTERM where it has none; then SIGINT; then SIGKILL."""
        self.close_stdin()
        if self.stdin is None:
            self.signal(signal.SIGTERM)
        for number, wait_s in ((None, grace_s), (signal.SIGINT, END_S_MAX), (signal.SIGKILL, END_S_MAX)):
            if number is not None:
                self.signal(number)
            if self.wait(wait_s):
                break
        self._join_readers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Service:
    """A `baton` command, or another program, that serves until it is ended."""

    name: str
    arguments: tuple[str, ...]
    """Verb and options, without --port."""
    ready_prefix: str
    """Its first line starts with this; the URL follows."""
    port: int = 0
    """0: a free port, which it keeps when it is restarted."""
    program: str = ""
    """Another program, with a port of its own on loopback: only its /health says that it serves. When it has
    ended, its last lines are reported, and what is left of its process group is killed."""
    host: str = ""
    """Where the supervisor listens for it: clients that connect while it is restarted wait for it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of this service alone."""
    modules: tuple[str, ...] = ()
    """What takes it seconds to import: it is forked from a process that has imported them."""


@dataclass(slots=True)
class SupervisedService:
    """A service and its current process."""

    service: Service
    process: ChildProcess | None = None
    listener: socket.socket | None = None
    url: str = ""
    is_listening: bool = False
    """Whether the current process has printed its URL."""
    is_ready: bool = False
    was_ready: bool = False
    stage: str = "starting"
    """What /health says it is doing, for people."""
    ends_s: deque[float] = field(default_factory=deque)

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self.process is not None and self.process.is_running

    def command(self) -> list[str]:
        """The argv: on the port that it had before, if it had one."""
        service = self.service
        port = int(self.url.rpartition(":")[2].rstrip("/")) if self.url else service.port
        words = (*service.arguments, "--port", str(port))
        if service.modules:
            return list(words)
        return [service.program, *words] if service.program else baton_command(*words)

    def ended(self, code: int, error: str, now_s: float) -> str:
        """Counts an end; says that it is restarted, or raises the reason why it is not."""
        name, error = self.service.name, error.removeprefix("baton: ")
        if code == 2:
            raise ConfigError(f"{name}: {error}")
        how = describe_exit(code) + (f" ({error})" if code >= 0 else "")
        if not self.was_ready:
            raise ProcessError(f"{name} {how} before it was ready")
        self.ends_s.append(now_s)
        while self.ends_s[0] < now_s - RESTART_WINDOW_S:
            self.ends_s.popleft()
        if len(self.ends_s) > RESTARTS_MAX:
            raise ProcessError(
                f"{name} ended {len(self.ends_s)} times within {RESTART_WINDOW_S:.0f} s; "
                f"the last time it {how}"
            )
        return f"{how}; restarting it ({len(self.ends_s)} of at most {RESTARTS_MAX} restarts a minute)"

    def on_line(self, line: str) -> bool:
        """Takes the URL from the ready line; False for any other line."""
        prefix = self.service.ready_prefix
        if self.service.program or self.is_listening or not line.startswith(prefix):
            return False
        self.url, self.is_listening = line.removeprefix(prefix).strip(), True
        return True


class Supervisor:
    """Keeps services running until it is closed, or until one of them has failed for good."""

    def __init__(self, env: Mapping[str, str], on_line: Callable[[str, str], None], folder: str = "") -> None:
        """`on_line` gets a service's name and a line of it or about it.

        `folder` is made, and removed at the end. The guard knows it before it exists, and removes it if this
        process is killed.
        """
        self.services: dict[str, SupervisedService] = {}
        self._env, self._on_line, self._folder = env, on_line, folder
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._failure: BatonError | None = None
        self._is_closing = threading.Event()
        self._is_hurried = False
        self._guard = subprocess.Popen(
            [sys.executable, "-m", __name__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if folder:
            os.mkdir(folder, mode=0o700)

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing.is_set()

    def start(self, service: Service) -> SupervisedService:
        """Starts a service, and restarts it from then on."""
        supervised = self.services[service.name] = SupervisedService(service)
        if service.host:
            supervised.listener = settings.open_listener(service.host, service.port)
        thread = threading.Thread(target=self._run, args=(supervised,), name=service.name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return supervised

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Whether a condition came true in time; raises the failure of a service that is not restarted."""
        limit_s = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if condition():
                    return True
                left_s = None if limit_s is None else limit_s - monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._changed.wait(left_s)

    def replace(self, service: Service) -> None:
        """Ends a service's process and starts another command in its place, on the same port."""
        supervised = self.services[service.name]
        process = supervised.process
        assert process is not None, "it was started"
        with self._changed:
            supervised.service = service
            supervised.is_ready = supervised.was_ready = False
        process.signal(signal.SIGTERM)
        self.wait_until(lambda: supervised.process is not process)

    def hurry(self) -> None:
        """While it closes: do not wait for requests that are still running. Safe in a signal handler."""
        self._is_hurried = True

    def close(self, groups: Sequence[Sequence[str]]) -> None:
        """Ends the services, one group of names after another, then the guard."""
        self._is_closing.set()
        for group in groups:
            self._end([self.services[name] for name in group if name in self.services])
        for thread in self._threads:
            thread.join(END_S_MAX)
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait(GUARD_S_MAX)
        if self._folder:  # the guard may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, group: Sequence[SupervisedService]) -> None:
        for number, wait_s in (
            (signal.SIGTERM, DRAIN_S_MAX),
            (signal.SIGINT, END_S_MAX),
            (signal.SIGKILL, END_S_MAX),
        ):
            if number == signal.SIGTERM and self._is_hurried:
                continue
            for supervised in group:
                if supervised.process is not None:
                    supervised.process.signal(number)
            limit_s = monotonic() + wait_s
            while any(supervised.is_running for supervised in group) and monotonic() < limit_s:
                if number == signal.SIGTERM and self._is_hurried:
                    break
                with self._changed:
                    self._changed.wait(0.1)
            if not any(supervised.is_running for supervised in group):
                return

    def _run(self, supervised: SupervisedService) -> None:
        """The thread of one service."""
        with supervised.listener or nullcontext():
            self._keep_running(supervised)

    def _keep_running(self, supervised: SupervisedService) -> None:
        """Starts a service, waits for its end, starts it again."""
        while not self._is_closing.is_set():
            service = supervised.service
            try:
                process = self._spawn(supervised)
            except BatonError as error:  # a fork server cannot import its modules
                self._failure = error
                self._notify()
                return
            process.wait()
            if service.program:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.close()
            self._tell_guard(-process.pid)
            if service.program and not self._is_closing.is_set():
                for line in process.last_lines:
                    self._on_line(service.name, LAST_LINE + line)
            if self._is_closing.is_set() or supervised.service is not service:
                self._notify()
                continue
            try:
                message = supervised.ended(process.popen.returncode, process.last_error, monotonic())
            except BatonError as error:
                self._failure = error
                self._notify()
                return
            self._on_line(service.name, message)
            with self._changed:
                supervised.is_listening = supervised.is_ready = False
                self._changed.notify_all()
            self._is_closing.wait(RESTART_PAUSE_S * (2 ** (len(supervised.ends_s) - 1) - 1))

    def _spawn(self, supervised: SupervisedService) -> ChildProcess:
        name, service = supervised.service.name, supervised.service
        supervised.is_listening = bool(service.program)
        if service.program:
            supervised.url = f"http://127.0.0.1:{service.port}"

        def on_line(line: str) -> None:
            if supervised.on_line(line):
                self._notify()
            else:
                self._on_line(name, line)

        environment = {**self._env, **service.env}
        fds = []
        if supervised.listener is not None:
            fds.append(supervised.listener.fileno())
            environment[settings.LISTENER_VARIABLE] = str(fds[0])
        fork_server = None
        if service.modules:
            fork_server = FORK_SERVERS.get(settings.rank_environment(1), service.modules)
        process = ChildProcess(
            name,
            supervised.command(),
            env=environment,
            death_signal=signal.SIGINT,
            pass_fds=fds,
            on_line=on_line,
            fork_server=fork_server,
        )
        supervised.process = process
        self._tell_guard(process.pid)
        if self._is_closing.is_set():
            process.signal(signal.SIGKILL)
        self._notify()
        return process

    def _tell_guard(self, number: int) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError, ValueError):  # without a guard the kernel still interrupts the service
            self._guard.stdin.write(f"{number}\n".encode())
            self._guard.stdin.flush()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def guard(folder: str, end_s_max: float = 2 * END_S_MAX) -> None:
    """Reads process ids from stdin, a line each, with a minus where one has ended.

    When stdin ends, so has the parent: ends the other processes and what is left of their groups, and removes
    the folder, if one is named.
    """
    # The signals that end the parent's terminal or session must not end the guard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handles = {}
    for line in sys.stdin:
        if (handle := handles.pop(-int(line), None)) is not None:
            os.close(handle)
            continue
        with suppress(OSError):  # a handle stays with its process; a pid may be reused
            handles[int(line)] = os.pidfd_open(int(line))
    leaders = list(handles.values())
    running = {*leaders, *_group_members(set(handles))}
    for number, wait_s in ((signal.SIGINT, end_s_max), (signal.SIGKILL, END_S_MAX)):
        for handle in leaders if number == signal.SIGINT else running:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, number)
        limit_s = monotonic() + wait_s
        while running and monotonic() < limit_s:
            ended, _, _ = select.select(list(running), [], [], max(0.0, limit_s - monotonic()))
            running.difference_update(ended)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _group_members(groups: set[int]) -> list[int]:
    """Handles of the other processes of these groups: a program may not end its own children."""
    members = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        with suppress(OSError):
            if pid not in groups and os.getpgid(pid) in groups:
                members.append(os.pidfd_open(pid))
    return members


if __name__ == "__main__":
    guard(sys.argv[1], *map(float, sys.argv[2:]))
