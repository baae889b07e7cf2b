"""The rank processes of an instance: each has a pipe, and none outlives its parent."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from baton import settings
from baton.engine.commands import Command, Reply, WorkerConfig
from baton.engine.instance.kin import NURSERY, ended
from baton.engine.rank.birth import Birth
from baton.errors import EngineError

RANK: tuple[str, ...] = ("baton.engine.worker",)
"""The module of a rank, and words for it."""
END_S_MAX = 6.0
"""How long a rank has to end before it is killed: more than it takes itself, less than makes pages stuck."""


class Child:
    """One rank process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.rank = config.rank
        self.name = f"rank {config.rank} of {config.instance}"
        environment = settings.rank_environment(config.num_threads)
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        with theirs:
            self.process = NURSERY.cradle(environment).bear(theirs.fileno(), self._errors.fileno())
        self.connection = Connection(ours.detach())
        self._decoder = msgspec.msgpack.Decoder(Reply)
        birth = Birth(f"baton rank {config.rank}", RANK[0], RANK[1:], environment)
        self.tell_raw(msgspec.msgpack.encode(birth))
        self.tell_raw(msgspec.msgpack.encode(config))

    @staticmethod
    def encode(order: Command) -> bytes:
        """An order as it goes over the pipe."""
        return msgspec.msgpack.encode(order)

    def tell(self, order: Command) -> None:
        """One order."""
        self.tell_raw(self.encode(order))

    def tell_raw(self, raw: bytes) -> None:
        """An encoded order; a child that is gone is noticed by its answers."""
        with suppress(OSError):
            self.connection.send_bytes(raw)

    def heard(self) -> Reply:
        """The next answer; raises EngineError with the child's last words at its end."""
        try:
            answer: Reply = self._decoder.decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self.lost() from None
        return answer

    def check_alive(self) -> None:
        """Raises EngineError with its last words if it has ended and said nothing more."""
        if self.process.poll() is not None and not self.connection.poll():
            raise self.lost()

    def hang_up(self) -> None:
        """Lets it end: a rank does not outlive its pipe for long."""
        with suppress(OSError):
            self.connection.close()

    def close(self) -> None:
        """Waits for its end, and brings it about if it does not come."""
        self.hang_up()
        try:
            self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        self._errors.close()

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait(END_S_MAX)

    def lost(self) -> EngineError:
        """That it ended, with its last words."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S_MAX)
        return ended(self.name, self.process.returncode, self._errors)


class Meeting:
    """A folder in which the ranks of an instance find each other."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="baton-")

    @property
    def path(self) -> str:
        """A file that does not exist yet."""
        return str(Path(self._folder) / "ranks")

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self._folder, ignore_errors=True)
