"""A fleet whose sides end and start again, with ranks that tell more than a benchmark asks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import monotonic
from typing import Any

from baton.bench.handoff.fleet import Fleet
from baton.bench.handoff.rank import BenchRank, main
from baton.bench.handoff.workload import SIDES
from baton.protocol.outcomes import Failed, Ready, State


@dataclass(slots=True)
class FaultFleet(Fleet):
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


class FaultRank(BenchRank):
    """Every public method can be called by the test."""

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
