"""What lies between two instances in a paired run: their sessions, and the bytes that move."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from tests.protocol.choices import Choices
from tests.protocol.paired_setup import BrokenError, Faults, Setup

from baton.protocol.ledger import Pair
from baton.protocol.messages import Message
from baton.protocol.sender import Chunk

NUM_SESSIONS_MAX = 100
"""Sessions of one target, one after another; their numbers are the target's times this, and on."""
AHEAD_MAX = 4
"""How many messages another may overtake."""


@dataclass
class Letter:
    """A message under way."""

    message: Message
    is_copy: bool = False


@dataclass
class Link:
    """The session of a target with the source: ordered and lossless, unless the faults say otherwise."""

    target: int
    faults: Faults
    incarnation: int = 1
    is_up: bool = True
    to_source: deque[Letter] = field(default_factory=deque)
    to_target: deque[Letter] = field(default_factory=deque)
    unaware: set[str] = field(default_factory=set)
    """Who has not noticed yet that the session is gone."""

    @property
    def number(self) -> int:
        return self.target * NUM_SESSIONS_MAX + self.incarnation

    @property
    def channel(self) -> bytes:
        return self.number.to_bytes(16, "little")

    @property
    def is_empty(self) -> bool:
        return not self.to_source and not self.to_target

    def lose(self) -> None:
        self.is_up = False
        self.to_source.clear()
        self.to_target.clear()
        self.unaware = {"source", "target"}

    def heal(self) -> None:
        self.incarnation += 1
        self.is_up = True

    def put(self, queue: deque[Letter], message: Message) -> None:
        if self.is_up:
            queue.append(Letter(message))

    def take(self, queue: deque[Letter], choices: Choices) -> Message:
        index = choices.below(min(len(queue), AHEAD_MAX)) if self.faults.reorders else 0
        letter = queue[index]
        del queue[index]
        if self.faults.repeats and not letter.is_copy and choices.one_in(3):
            queue.insert(
                choices.below(len(queue) + 1) if self.faults.reorders else 0, Letter(letter.message, True)
            )
        return letter.message


@dataclass
class Flight:
    """The copies of one chunk of one source rank, or what is left of them after an error."""

    source: int
    chunk: Chunk
    grant: bytes
    is_off: bool = False

    def reaches(self, setup: Setup, target: int) -> bool:
        """Whether it may write anything at a target rank."""
        pair = (self.source, target)
        return pair in setup.needs and bool(setup.cells(pair, self.chunk.box))


@dataclass
class Memory:
    """A target's pages and staging under one grant, and who can still write them."""

    setup: Setup
    grant: bytes
    written: dict[Pair, Counter[tuple[int, int]]] = field(default_factory=dict)
    staged: set[tuple[int, int, int]] = field(default_factory=set)
    """Source rank, target rank, chunk."""
    barred: set[int] = field(default_factory=set)
    """Target ranks at which the transport has turned the source out."""
    is_released: bool = False

    def land(self, flight: Flight) -> None:
        """The bytes of a chunk arrive, where the source is not turned out."""
        for target in self.setup.targets(flight.source):
            pair = (flight.source, target)
            if target in self.barred or not flight.reaches(self.setup, target):
                continue
            if self.is_released:
                raise BrokenError(f"{pair} wrote chunk {flight.chunk.index} after the pages were released")
            if pair in self.setup.worked:
                self.staged.add((*pair, flight.chunk.index))
            else:
                self._write(pair, flight.chunk)

    def unpack(self, target: int, source: int, chunk: Chunk) -> None:
        """A rank brings a staged chunk home."""
        if self.is_released:
            raise BrokenError(f"rank {target} unpacked after the pages were released")
        if (source, target, chunk.index) not in self.staged:
            raise BrokenError(f"rank {target} unpacked what was not staged")
        self._write((source, target), chunk)

    def _write(self, pair: Pair, chunk: Chunk) -> None:
        self.written.setdefault(pair, Counter()).update(self.setup.cells(pair, chunk.box))

    def check_complete(self) -> None:
        """Every needed cell was written, once."""
        for pair in self.setup.needs:
            wanted = Counter(dict.fromkeys(self.setup.cells(pair), 1))
            if self.written.get(pair, Counter()) != wanted:
                raise BrokenError(f"ready, but pair {pair} has {self.written.get(pair)} of {wanted}")
