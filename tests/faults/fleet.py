"""A fleet whose sides end and start again, with ranks that tell more than a benchmark asks."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from baton.bench.handoff.fleet import RankFleet
from baton.bench.handoff.rank import BenchRank, main
from baton.bench.handoff.stress import StressOptions, StressRun
from baton.bench.handoff.workload import SIDES
from baton.protocol.outcomes import Failed, Ready, State, Why
from baton.session.handles import Handle


@dataclass(slots=True)
class FaultFleet(RankFleet):
    """All processes of a workload."""

    rank_module: str = "tests.faults.fleet"

    def end(self, side: str) -> None:
        """Kills the processes of one side, stopped or not."""
        for rank in self.sides.pop(side):
            rank.kill()
            rank.close()

    def mend(self) -> None:
        """Restarts each side of which a rank has ended."""
        for side in SIDES:
            ranks = self.sides.get(side, [])
            if not ranks or not all(rank.is_running for rank in ranks):
                if side in self.sides:
                    self.end(side)
                self.start(side)

    def start(self, side: str) -> None:
        """Starts the ranks of one side."""
        self._launch(side)
        self._configure(side)


@dataclass(frozen=True, slots=True)
class StormOptions(StressOptions):
    """A stress load of which each rank aborts some transfers."""

    abort_share: float = 0.0
    """The share of transfers that this rank aborts, at a random time up to `abort_s_max`."""
    abort_s_max: float = 0.05
    seed: int = 0
    is_central: bool = False
    """Whether one target rank names the pages of all; the other target ranks take no part."""


class Storm(StressRun):
    """One rank's side of a storm."""

    def __init__(self, rank: FaultRank, options: StormOptions, is_target: bool) -> None:
        super().__init__(rank, options, is_target)
        self.aborts_s: dict[str, float] = {}
        self.random = random.Random(options.seed)
        self.num_aborted = 0
        self.last: list[tuple[int, int]] = []
        """Slot and salt of the transfers of the last round that became ready."""

    def begin(self, slot: int, round_index: int) -> None:
        super().begin(slot, round_index)
        if self.random.random() < self._options.abort_share:
            when_s = monotonic() + self.random.uniform(0, self._options.abort_s_max)
            self.aborts_s[self._options.transfer(slot, round_index)] = when_s

    def pause_s(self, limit_s: float) -> float:
        return super().pause_s(min([limit_s, *self.aborts_s.values()]))

    def look(self) -> None:
        for transfer in [name for name, when_s in self.aborts_s.items() if when_s <= monotonic()]:
            del self.aborts_s[transfer]
            self._rank.abort(transfer)
        super().look()

    def end(self, slot: int, round_index: int, handle: Handle) -> None:
        if handle.transfer in self.aborts_s:
            return  # it is aborted all the same
        state = handle.state
        if isinstance(state, Failed) and state.cause.why is Why.ABORTED:
            self.num_aborted += 1
            self.tally.failures[str(state.cause)] = self.tally.failures.get(str(state.cause), 0) - 1
        elif isinstance(state, Ready) and round_index + 1 == self._options.num_rounds:
            self.last.append((slot, self._options.salt(slot, round_index)))
        super().end(slot, round_index, handle)


class FaultRank(BenchRank):
    """Every public method can be called by the test."""

    is_central = False

    def storm(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Many small transfers at a time, some of them aborted."""
        options = msgspec.convert(fields, StormOptions)
        self.is_central = options.is_central
        storm = Storm(self, options, is_target=self.config.side == "target")
        self.endpoint.on_change(storm.changed)
        tally = storm.run()
        failures = {text: count for text, count in tally["failures"].items() if count}
        return {**tally, "failures": failures, "num_aborted": storm.num_aborted, "last": storm.last}

    def start(self, transfer: str, slot: int, salt: int) -> bool:
        """As a benchmark does, or one target rank for all."""
        if self.is_central and self.config.side == "target":
            return self.receive(transfer, slot)
        return super().start(transfer, slot, salt)

    def abort(self, transfer: str) -> bool:
        """Aborts a transfer."""
        self.handles[transfer].abort("aborted by the test")
        return True

    def wait(self, transfer: str, timeout_s: float) -> dict[str, Any]:
        """The outcome of a transfer and its time, or `waiting` when the time is up."""
        state = self.handles[transfer].wait(timeout_s)
        return {**outcome_json(state), "at_s": monotonic(), "is_released": self.handles[transfer].is_released}

    def wait_released(self, transfer: str, timeout_s: float) -> bool:
        """Whether the pages of a transfer were released in time."""
        return self.handles[transfer].wait_released(timeout_s)

    def held(self) -> list[str]:
        """The transfers whose pages have not been released."""
        return [transfer for transfer, handle in self.handles.items() if not handle.is_released]

    def num_copying(self) -> int:
        """At a source: copies that have not ended."""
        return len(self.transport._open)

    def num_read(self, transfer: str) -> int:
        """At a source: pages that a copy of a transfer reads or will read."""
        return sum(len(pages) for pages in self._sending(transfer).reading().values())

    def counts(self) -> dict[str, int]:
        """Open objects of this rank, and of the coordinator if it runs here."""
        return dict(self.endpoint.counts())

    def num_descriptors(self) -> int:
        """Open file descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))


def outcome_json(state: State) -> dict[str, Any]:
    """An outcome as plain data."""
    match state:
        case Failed(cause=cause):
            place = {"instance": cause.instance, "rank": cause.rank, "text": cause.text}
            return {"state": "failed", "why": cause.why.value, "stage": cause.stage.value, **place}
        case Ready(aux=aux):
            return {"state": "ready", "from": aux.fields.get("from")}
        case _:
            return {"state": type(state).__name__.lower()}


if __name__ == "__main__":
    main(FaultRank)
