"""A stress load: many small transfers at a time; every slot is handed over again as soon as it is free.

Both sides name the transfers by slot and round, so neither waits for the other. Each target rank names the
pages of its own pools, as an engine without a common scheduler does; or one rank names all of them. The
content of a slot differs in every round, and every target rank compares it before the pages are used again.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from baton.protocol.outcomes import Failed, Ready, State
from baton.session.handles import Handle


@dataclass(frozen=True, slots=True)
class StressOptions:
    """The load that every rank runs."""

    name: str
    num_slots: int
    num_rounds: int
    timeout_s: float = 120.0

    def transfer(self, slot: int, round_index: int) -> str:
        """The transfer id, the same on both sides."""
        return f"{self.name}-{slot}-{round_index}"

    def salt(self, slot: int, round_index: int) -> int:
        """The salt of its content."""
        return 1 + round_index * self.num_slots + slot


class StressRank(Protocol):
    """What a rank does for a transfer."""

    handles: dict[str, Handle]

    def start(self, transfer: str, slot: int, salt: int) -> bool:
        """Starts this rank's part of a transfer, with all content ready."""

    def compare(self, slot: int, salt: int) -> list[int]:
        """Number of bytes that should have arrived, and of those that are right."""


@dataclass(slots=True)
class StressTally:
    """The outcomes at one rank."""

    num_ready: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    num_right: int = 0
    held: list[str] = field(default_factory=list)
    """Transfers whose pages were not released in time, with their state."""
    elapsed_s: float = 0.0
    num_at_once_max: int = 0

    def count(self, state: State) -> None:
        """Counts one outcome."""
        match state:
            case Ready():
                self.num_ready += 1
            case Failed(cause=cause):
                self._fail(str(cause))
            case _:
                self._fail(type(state).__name__)

    def _fail(self, text: str) -> None:
        self.failures[text] = self.failures.get(text, 0) + 1


class StressRun:
    """One rank's side of the load."""

    def __init__(self, rank: StressRank, options: StressOptions, is_target: bool) -> None:
        self._rank, self._options, self._is_target = rank, options, is_target
        self._changed = threading.Event()
        self._rounds: dict[int, int] = {}
        self.tally = StressTally()

    def changed(self, handle: Handle) -> None:
        """Called on any thread when a handle changes."""
        self._changed.set()

    def run(self) -> dict[str, Any]:
        """Runs until every slot has had all its rounds, or the time is up."""
        start_s = monotonic()
        limit_s = start_s + self._options.timeout_s
        for slot in range(self._options.num_slots):
            self.begin(slot, 0)
        while self._rounds and monotonic() < limit_s:
            self._changed.wait(self.pause_s(limit_s))
            self._changed.clear()
            self.look()
        self.tally.elapsed_s = monotonic() - start_s
        for slot, round_index in self._rounds.items():
            transfer = self._options.transfer(slot, round_index)
            self.tally.held.append(f"{transfer}: {self._rank.handles[transfer].state}")
        return asdict(self.tally)

    def begin(self, slot: int, round_index: int) -> None:
        """Starts a slot's next transfer."""
        options = self._options
        transfer = options.transfer(slot, round_index)
        self._rounds[slot] = round_index
        self._rank.start(transfer, slot, options.salt(slot, round_index))
        self.tally.num_at_once_max = max(self.tally.num_at_once_max, len(self._rounds))

    def pause_s(self, limit_s: float) -> float:
        """How long nothing is to be done unless a handle changes."""
        return max(0.0, limit_s - monotonic())

    def look(self) -> None:
        """Ends what is over."""
        for slot, round_index in list(self._rounds.items()):
            handle = self._rank.handles[self._options.transfer(slot, round_index)]
            if handle.is_released:
                self.end(slot, round_index, handle)

    def end(self, slot: int, round_index: int, handle: Handle) -> None:
        """Counts a transfer, and starts the next one of its slot."""
        self.tally.count(handle.state)
        if self._is_target and isinstance(handle.state, Ready):
            num_bytes, num_right = self._rank.compare(slot, self._options.salt(slot, round_index))
            self.tally.num_bytes += num_bytes
            self.tally.num_right += num_right
        del self._rank.handles[handle.transfer]
        del self._rounds[slot]
        if round_index + 1 < self._options.num_rounds:
            self.begin(slot, round_index + 1)
