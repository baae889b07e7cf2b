"""Many small transfers at a time: every slot of the pools is handed over again as soon as it is free.

Both sides name the transfers alike, by slot and round, and each goes on by itself. A target rank names the
pages of its own pools, as an engine without a common scheduler does; or one rank alone names all of them.
The content of a slot is another in every round, and is compared before its pages are used again, on every
rank that takes part. Some transfers are given up on purpose.
"""

from __future__ import annotations

import random
import threading
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from baton.protocol.outcomes import Failed, Ready, State, Why
from baton.session.handles import Handle


@dataclass(frozen=True, slots=True)
class Grist:
    """How much is to be done."""

    name: str
    num_slots: int
    num_rounds: int
    timeout_s: float = 120.0
    abort_share: float = 0.0
    """Of the transfers, how many this rank gives up, at a moment drawn from `abort_s_max`."""
    abort_s_max: float = 0.05
    seed: int = 0
    is_central: bool = False
    """Whether one target rank names the pages of all, the only one to take part."""

    def transfer(self, slot: int, turn: int) -> str:
        """The name that both sides give it."""
        return f"{self.name}-{slot}-{turn}"

    def salt(self, slot: int, turn: int) -> int:
        """What its content is salted with."""
        return 1 + turn * self.num_slots + slot


class Worker(Protocol):
    """What a rank does of a transfer."""

    handles: dict[str, Handle]

    def start(self, transfer: str, slot: int, salt: int, is_central: bool = False) -> bool:
        """Begins this rank's part, all of it ready at once."""

    def compare(self, slot: int, salt: int) -> list[int]:
        """Bytes that should be there, and how many are right."""

    def abort(self, transfer: str) -> bool:
        """Gives a transfer up."""


@dataclass(slots=True)
class Tally:
    """What became of the transfers at one rank."""

    num_ready: int = 0
    num_aborted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    num_right: int = 0
    last: list[tuple[int, int]] = field(default_factory=list)
    """Slot and salt of what was ready in the last round."""
    held: list[str] = field(default_factory=list)
    """Transfers whose pages did not come back in time, and what was known of them."""
    elapsed_s: float = 0.0
    num_at_once_max: int = 0

    def count(self, state: State) -> None:
        """Notes one outcome."""
        match state:
            case Ready():
                self.num_ready += 1
            case Failed(cause=cause) if cause.why is Why.ABORTED:
                self.num_aborted += 1
            case Failed(cause=cause):
                self._fail(str(cause))
            case _:
                self._fail(type(state).__name__)

    def _fail(self, text: str) -> None:
        self.failures[text] = self.failures.get(text, 0) + 1


class Mill:
    """One rank's side of it."""

    def __init__(self, worker: Worker, grist: Grist, is_target: bool) -> None:
        self._worker, self._grist, self._is_target = worker, grist, is_target
        self._changed = threading.Event()
        self._turns: dict[int, int] = {}
        self._doomed: dict[str, float] = {}
        self._chance = random.Random(grist.seed)
        self.tally = Tally()

    def changed(self, handle: Handle) -> None:
        """Something happened to a handle; from any thread."""
        del handle
        self._changed.set()

    def run(self) -> dict[str, Any]:
        """Until every slot had all its rounds, or the time is up."""
        start_s = monotonic()
        limit_s = start_s + self._grist.timeout_s
        for slot in range(self._grist.num_slots):
            self._begin(slot, 0)
        while self._turns and monotonic() < limit_s:
            self._changed.wait(self._pause_s(limit_s))
            self._changed.clear()
            self._look()
        self.tally.elapsed_s = monotonic() - start_s
        for slot, turn in self._turns.items():
            transfer = self._grist.transfer(slot, turn)
            self.tally.held.append(f"{transfer}: {self._worker.handles[transfer].state}")
        return asdict(self.tally)

    def _begin(self, slot: int, turn: int) -> None:
        grist = self._grist
        transfer = grist.transfer(slot, turn)
        self._turns[slot] = turn
        self._worker.start(transfer, slot, grist.salt(slot, turn), grist.is_central)
        self.tally.num_at_once_max = max(self.tally.num_at_once_max, len(self._turns))
        if self._chance.random() < grist.abort_share:
            self._doomed[transfer] = monotonic() + self._chance.uniform(0, grist.abort_s_max)

    def _pause_s(self, limit_s: float) -> float:
        return max(0.0, min([limit_s, *self._doomed.values()]) - monotonic())

    def _look(self) -> None:
        now_s = monotonic()
        for transfer in [name for name, when_s in self._doomed.items() if when_s <= now_s]:
            del self._doomed[transfer]
            self._worker.abort(transfer)
        for slot, turn in list(self._turns.items()):
            transfer = self._grist.transfer(slot, turn)
            handle = self._worker.handles[transfer]
            if handle.is_released and transfer not in self._doomed:
                self._end(slot, turn, handle)

    def _end(self, slot: int, turn: int, handle: Handle) -> None:
        self.tally.count(handle.state)
        if self._is_target and isinstance(handle.state, Ready):
            num_bytes, num_right = self._worker.compare(slot, self._grist.salt(slot, turn))
            self.tally.num_bytes += num_bytes
            self.tally.num_right += num_right
            if turn + 1 == self._grist.num_rounds:
                self.tally.last.append((slot, self._grist.salt(slot, turn)))
        del self._worker.handles[handle.transfer]
        del self._turns[slot]
        if turn + 1 < self._grist.num_rounds:
            self._begin(slot, turn + 1)
