"""Brings a transfer between real processes to a stage, breaks something there, and looks at who is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any

from tests.faults.fleet import FaultFleet

from baton.bench.handoff.fleet import RankProcess, ask_all
from baton.bench.handoff.workload import PrefillTiming, SideSpec, Workload, own_layers, sampler_rank
from baton.protocol.timings import Timings

TIMINGS = Timings(
    beat_s=0.1, silence_s=6.0, offer_s=60.0, progress_s=12.0, total_s=60.0, copy_s=6.0, redial_s_max=0.5
)
SETTLE_S_MAX = 60.0
MODEL = "paged:layers=4,heads=4,dim=32"
NUM_TOKENS = 512
STANDING = {"connections", "sessions", "writers"}
"""What an idle instance has of its peers, by the names of `counts`."""
SLOW_BYTES_PER_S = 0.5e6
"""Half a MiB a rank: copies take a second, and those of two ranks meet on a machine that others use."""


def workload_of(transport: str, link_bytes_per_s: float = SLOW_BYTES_PER_S) -> Workload:
    sides = SideSpec("tp2", 16), SideSpec("tp2", 16)
    return Workload(
        MODEL, *sides, NUM_TOKENS, num_slots=4, transport=transport, link_bytes_per_s=link_bytes_per_s
    )


class Stage(Enum):
    BEFORE_OFFER = "before the source has heard of it"
    MID_COPY = "mid copy"
    BEFORE_COMMIT = "after the last copy, before commit"
    AFTER_COMMIT = "after commit"
    AFTER_VERDICT = "after the verdict"


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Returns as soon as a condition of other processes holds."""
    limit_s = monotonic() + timeout_s
    while not condition():
        assert monotonic() < limit_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def bring_to(fleet: FaultFleet, stage: Stage, transfer: str, slot: int = 0) -> None:
    """Every call of the engines up to a stage, and the wait until it is reached."""
    first, sources = fleet.targets[0], fleet.sources
    first.ask("receive", transfer, slot)
    if stage is Stage.BEFORE_OFFER:
        return
    ask_all(sources, "send", transfer)
    for rank in sources:
        rank.ask(
            "ready", transfer, slot, own_layers(fleet.workload, rank.rank), (0, fleet.workload.num_tokens)
        )
    if stage is Stage.MID_COPY:
        until(lambda: all(ask_all(sources, "num_copying")), SETTLE_S_MAX, "copies on every source rank")
        return
    until(lambda: not any(ask_all(sources, "num_read", transfer)), SETTLE_S_MAX, "all copies ended")
    if stage is Stage.BEFORE_COMMIT:
        return
    for rank in sources:
        is_sampler = rank.rank == sampler_rank(fleet.workload)
        # The verdict needs every rank's word, so that of one is held back.
        if stage is Stage.AFTER_VERDICT or not is_sampler:
            rank.ask("commit", transfer, is_sampler)
    if stage is Stage.AFTER_VERDICT:
        for rank in (first, *sources):
            assert rank.ask("wait", transfer, SETTLE_S_MAX)["state"] == "ready"


@dataclass(frozen=True, slots=True)
class Fault:
    """Who is hit, and by what."""

    side: str
    rank: int
    is_stop: bool

    @property
    def other(self) -> str:
        return "target" if self.side == "source" else "source"

    def victim(self, fleet: FaultFleet) -> RankProcess:
        return fleet.sides[self.side][self.rank]

    def survivors(self, fleet: FaultFleet) -> list[RankProcess]:
        """The ranks of the other side that hold a handle of the transfer."""
        return fleet.sources if self.other == "source" else fleet.targets[:1]

    def strike(self, fleet: FaultFleet) -> float:
        """Does it, and says when."""
        victim = self.victim(fleet)
        struck_s = monotonic()
        victim.signal(signal.SIGSTOP if self.is_stop else signal.SIGKILL)
        return struck_s

    def __str__(self) -> str:
        return f"{'stop' if self.is_stop else 'kill'} {self.side} rank {self.rank}"


def outcomes(ranks: list[RankProcess], transfer: str, timeout_s: float) -> list[dict[str, Any]]:
    """What each rank's handle says, after waiting for it."""
    return ask_all(ranks, "wait", transfer, timeout_s)


def assert_hands_over(fleet: FaultFleet, salt: int) -> None:
    """A new transfer into the pages of slot 0 succeeds, and every byte of it is right."""
    ask_all(fleet.targets, "wipe")
    fleet.fill([0], salt)
    found = fleet.hand_off(PrefillTiming())
    assert found.is_ready, found.received.outcome
    verdict = fleet.compare(0, salt)
    assert verdict.num_right == verdict.num_bytes > 0


def assert_nothing_under_way(ranks: list[RankProcess]) -> None:
    """No transfer, grant or page is left of what happened."""
    for rank in ranks:
        assert rank.ask("held") == []
        until(
            lambda rank=rank: not any(_open_counts(rank).values()),
            SETTLE_S_MAX,
            f"{rank.name} idle, but {_open_counts(rank)}",
        )


def _open_counts(rank: RankProcess) -> dict[str, int]:
    return {name: count for name, count in rank.ask("counts").items() if name not in STANDING}


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie of ours."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False
    return state != "Z"


def named_segments(pid: int, folder: str = "/dev/shm/") -> set[str]:
    """Shared memory of a process that has a name, and would stay when the process is killed."""
    root = Path(f"/proc/{pid}")
    try:
        lines = (root / "maps").read_text().splitlines()
        found = {line.split(None, 5)[5] for line in lines if folder in line}
        for fd in (root / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(fd))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return set()
    return {
        name.removeprefix(folder)
        for name in found
        if name.startswith(folder) and not name.endswith(" (deleted)")
    }
