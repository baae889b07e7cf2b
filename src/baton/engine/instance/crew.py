"""The ranks of an instance together: they start as one and end as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from time import monotonic, sleep

from baton.engine.commands import (
    AttachCoordinator,
    Command,
    Reply,
    Stop,
    WorkerConfig,
    WorkerFailed,
    WorkerReady,
)
from baton.engine.instance.children import Child, Meeting
from baton.errors import EngineError

START_S_MAX = 600.0
LOOK_S = 0.5
LOST_S = 0.2
"""How long a rank that was killed may take to be found gone."""
OWN_ERROR = 1
"""The exit code of a rank that said why it ends, or that lost the others."""


class Crew:
    """Rank processes, and where their coordinator is once they are up."""

    def __init__(self) -> None:
        self.meeting = Meeting()
        self.up = WorkerReady(0)
        self._children: list[Child] = []
        self.is_closed = False

    @property
    def connections(self) -> dict[Connection, Child]:
        """Every rank by its end of the pipe."""
        return {child.connection: child for child in self._children}

    def start(self, configs: Sequence[WorkerConfig], progress: Callable[[str], None]) -> None:
        """Starts the ranks and waits until all are up."""
        self._children = [Child(config) for config in configs]
        first, *others = self._children
        self.up = self._await_up(first)
        for child in others:
            child.tell(AttachCoordinator(self.up.coordinator, self.up.epoch))
        progress(f"{first.name} is up")
        for child in others:
            self._await_up(child)
            progress(f"{child.name} is up")
        # The first one's second word: all are attached, and hand-overs are taken.
        self.up = self._await_up(first)

    def tell(self, order: Command) -> None:
        """Every rank hears every order."""
        raw = Child.encode(order)
        for child in self._children:
            child.tell_raw(raw)

    def why(self, told: EngineError) -> str:
        """Why the ranks ended: who was lost first says nothing, and others complain of it sooner."""
        limit_s = monotonic() + LOST_S
        while True:
            lost = [each for each in self._children if each.process.poll() not in (None, OWN_ERROR)]
            if lost or monotonic() > limit_s:
                break
            sleep(LOST_S / 20)
        words = [str(each.lost()) for each in lost if each.name not in str(told)]
        return "; ".join([*words, str(told)])

    def close(self) -> None:
        """Ends every rank."""
        self.tell(Stop())
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.close()
        self._children = []
        self.meeting.close()
        self.is_closed = True

    def _await_up(self, child: Child) -> WorkerReady:
        """The first word of a rank, while the others may fail too."""
        limit_s = monotonic() + START_S_MAX
        while not child.connection.poll(LOOK_S):
            for each in self._children:
                each.check_alive()
            if monotonic() > limit_s:
                raise EngineError(f"{child.name} did not start in {START_S_MAX:.0f} s")
        answer = child.heard()
        if isinstance(answer, WorkerFailed):
            raise EngineError(f"{child.name}: {answer.text}")
        assert isinstance(answer, WorkerReady), f"{child.name} said {answer} before it was up"
        return answer


def answers(child: Child) -> Iterator[Reply]:
    """Everything that a rank has said so far; raises EngineError when it cannot go on."""
    while child.connection.poll():
        answer = child.heard()
        if isinstance(answer, WorkerFailed):
            raise EngineError(f"{child.name}: {answer.text}")
        yield answer
