"""The worker processes of an instance, one per rank: they start together and end together."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic, sleep

import msgspec

from baton import settings
from baton.engine.commands import (
    AttachCoordinator,
    Command,
    Reply,
    Stop,
    WorkerFailed,
    WorkerReady,
)
from baton.engine.config import WorkerConfig, worker_modules
from baton.errors import EngineError
from baton.fork_server import FORK_SERVERS, SpawnRequest, ended_error

WORKER: tuple[str, ...] = ("baton.engine.worker",)
"""The module of a worker, and arguments for it."""
START_S_MAX = 600.0
LOOK_S = 0.5
END_S_MAX = 6.0
"""How long a worker has to end before it is killed: longer than its own limit, shorter than a lease."""
LOST_S = 0.2
"""How long it may take to notice that a worker was killed."""
OWN_ERROR = 1
"""The exit code of a worker that reported why it ends, or that lost the others."""


class WorkerProcess:
    """One worker and its pipe."""

    def __init__(self, config: WorkerConfig) -> None:
        self.rank = config.rank
        self.name = f"rank {config.rank} of {config.engine.name}"
        environment = settings.rank_environment(config.engine.num_threads)
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        with theirs:
            fork_server = FORK_SERVERS.get(environment, worker_modules(config.engine.model))
            self.process = fork_server.spawn(theirs.fileno(), self._output.fileno())
        self.connection = Connection(ours.detach())
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.send(SpawnRequest(f"baton rank {config.rank}", WORKER[0], WORKER[1:], environment))
        self.send(config)

    def send(self, message: Command | WorkerConfig | SpawnRequest) -> None:
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, raw: bytes) -> None:
        """Sends an encoded message; that a worker is gone is noticed when its replies are read."""
        with suppress(OSError):
            self.connection.send_bytes(raw)

    def receive(self) -> Reply:
        """The next reply; raises EngineError if the worker has ended or cannot continue."""
        try:
            reply: Reply = self._decoder.decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self.ended_error() from None
        if isinstance(reply, WorkerFailed):
            raise EngineError(f"{self.name}: {reply.text}")
        return reply

    def replies(self) -> Iterator[Reply]:
        """All replies so far."""
        while self.connection.poll():
            yield self.receive()

    def check_alive(self) -> None:
        """Raises EngineError with its last error if it has ended and left no reply."""
        if self.process.poll() is not None and not self.connection.poll():
            raise self.ended_error()

    def close_pipe(self) -> None:
        """Makes the worker end: it does not outlive its pipe for long."""
        with suppress(OSError):
            self.connection.close()

    def close(self) -> None:
        """Waits for the worker's end, and kills it if it takes too long."""
        self.close_pipe()
        try:
            self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S_MAX)
        self._output.close()

    def ended_error(self) -> EngineError:
        """Says that the worker ended, with its last error."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S_MAX)
        return ended_error(self.name, self.process.returncode, self._output)


class Executor:
    """All workers of an instance, and the address of their coordinator once they are up."""

    def __init__(self) -> None:
        self._rendezvous = -1
        """A file without a name, which nobody has to remove: torch.distributed connects the workers by it."""
        self.up = WorkerReady(0)
        self.workers: list[WorkerProcess] = []
        self.is_closed = False

    def start(self, config: WorkerConfig, num_ranks: int, progress: Callable[[str], None]) -> None:
        """Starts the workers, whose configs differ by the rank alone, and waits until all are up."""
        self._rendezvous = os.memfd_create("baton-rendezvous")
        config = replace(config, rendezvous=f"/proc/{os.getpid()}/fd/{self._rendezvous}")
        for rank in range(num_ranks):
            self.workers.append(WorkerProcess(replace(config, rank=rank)))
        first, *others = self.workers
        self.up = self._wait_up(first)
        for worker in others:
            worker.send(AttachCoordinator(self.up.coordinator, self.up.epoch))
        progress(_up_line(first, self.up))
        for worker in others:
            progress(_up_line(worker, self._wait_up(worker)))
        # Rank 0 reports a second time when all ranks are attached and hand-overs are accepted.
        self.up = self._wait_up(first)

    def send(self, message: Command) -> None:
        """Sends a message to every worker."""
        raw = msgspec.msgpack.encode(message)
        for worker in self.workers:
            worker.send_raw(raw)

    def failure_reason(self, error: EngineError) -> str:
        """Why the workers ended: one that was killed reports nothing, and others complain about it sooner."""
        limit_s = monotonic() + LOST_S
        while True:
            lost = [worker for worker in self.workers if worker.process.poll() not in (None, OWN_ERROR)]
            if lost or monotonic() > limit_s:
                break
            sleep(LOST_S / 20)
        reasons = [str(worker.ended_error()) for worker in lost if worker.name not in str(error)]
        return "; ".join([*reasons, str(error)])

    def close(self) -> None:
        """Ends every worker."""
        self.send(Stop())
        for worker in self.workers:
            worker.close_pipe()
        for worker in self.workers:
            worker.close()
        self.workers = []
        if self._rendezvous >= 0:
            os.close(self._rendezvous)
        self.is_closed = True

    def _wait_up(self, worker: WorkerProcess) -> WorkerReady:
        """Waits for a worker's first reply, while the others may fail too."""
        limit_s = monotonic() + START_S_MAX
        while not worker.connection.poll(LOOK_S):
            for other in self.workers:
                other.check_alive()
            if monotonic() > limit_s:
                raise EngineError(f"{worker.name} did not start in {START_S_MAX:.0f} s")
        reply = worker.receive()
        assert isinstance(reply, WorkerReady), f"{worker.name} sent {reply} before it was up"
        return reply


def _up_line(worker: WorkerProcess, ready: WorkerReady) -> str:
    return f"{worker.name} is up{'; ' if ready.note else ''}{ready.note}"
