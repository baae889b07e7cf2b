"""The control time of a transfer, and how many transfers run at once.

Small transfers come one after another, each at its own time, with all content ready. Control is the time from
then to ready at the target, less the time in which a copy ran: the engines' calls, every message of offer,
grant, commit and verdict, binding, and the waking of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import monotonic
from typing import Any

from rich.table import Table

from baton.bench.handoff.fleet import LEAD_S, RankFleet, ask_all
from baton.bench.handoff.records import SerialTransfer, TransferOrder, figures
from baton.bench.handoff.run import check_ready, ms
from baton.bench.handoff.stress import StressOptions
from baton.bench.handoff.workload import PrefillTiming, SideSpec, Workload

MODEL = "paged:layers=4,heads=4,dim=16"
NUM_TOKENS = 64
SPACING_S = 0.04
CONTROL_S_TARGET = 3e-3
NUM_AT_ONCE = 200
NUM_ALONE = 100
NUM_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class ControlResult:
    """Control times, and the outcomes of the transfers that ran at once."""

    scene: Workload
    tth_s: list[float]
    control_s: list[float]
    num_at_once: int
    num_transfers: int
    num_failed: int
    num_held: int
    num_bytes: int
    num_right: int
    elapsed_s: float
    failures: dict[str, int]

    @property
    def notes(self) -> list[str]:
        """None."""
        return []

    @property
    def control_s_median(self) -> float:
        """The median control time."""
        return median(self.control_s)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and every byte is right."""
        return not self.num_failed and not self.num_held and self.num_right == self.num_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """Medians and tails of the times, and the rest as it is."""
        record = asdict(self)
        for name in ("tth_s", "control_s"):
            values = record.pop(name)
            cuts = quantiles(values, n=20, method="inclusive")
            record[name] = {
                "count": len(values),
                "best": min(values),
                "median": median(values),
                "p95": cuts[-1],
            }
        record["control_s"]["target"] = CONTROL_S_TARGET
        record["control_s"]["is_met"] = self.control_s_median <= CONTROL_S_TARGET
        return record

    def table(self) -> Table:
        """Times one after another, and the rate of those at once."""
        workload = self.scene
        title = f"control, {workload.source.layout} to {workload.target.layout} by {workload.transport}"
        table = Table("measurement", "best", "median", "worst", title=title)
        for name, values in (("tth", self.tth_s), ("control", self.control_s)):
            texts = (ms(value) for value in (min(values), median(values), max(values)))
            table.add_row(f"{name} of {len(values)} one after another", *texts)
        rate = self.num_transfers / self.elapsed_s if self.elapsed_s else 0.0
        table.add_row(f"{self.num_transfers} transfers, {self.num_at_once} at once", "", f"{rate:.0f}/s", "")
        return table

    def summary(self) -> str:
        """One line."""
        verdict = "met" if self.control_s_median <= CONTROL_S_TARGET else "missed"
        num_wrong = self.num_bytes - self.num_right
        causes = "; ".join(f"{count} x {text}" for text, count in sorted(self.failures.items())[:3])
        return (
            f"control {ms(self.control_s_median)} median (target {ms(CONTROL_S_TARGET)}: {verdict}); "
            f"{self.num_transfers} transfers, {self.num_at_once} at once: {self.num_failed} failed, "
            f"{self.num_held} held, {num_wrong} of {self.num_bytes} bytes wrong"
            + (f"; {causes}" if causes else "")
        )


def small_workload(transport: str, source: str, target: str) -> Workload:
    """Tiny transfers between two layouts, with a slot for each that runs at once."""
    sides = SideSpec(source, page=16), SideSpec(target, page=16)
    return Workload(MODEL, *sides, NUM_TOKENS, num_slots=NUM_AT_ONCE, transport=transport)


def run(
    workload: Workload, num_alone: int, num_rounds: int, progress: Callable[[str], None]
) -> ControlResult:
    """Transfers one after another, then as many at once as there are slots."""
    progress("starting the processes")
    with RankFleet(workload) as fleet:
        fleet.fill([0])
        fleet.hand_off(PrefillTiming())
        progress(f"{num_alone} transfers, one after another")
        start_s = monotonic() + LEAD_S
        orders = [
            TransferOrder(fleet.new_transfer(), start_s=start_s + index * SPACING_S)
            for index in range(num_alone)
        ]
        handoffs = [check_ready(handoff) for handoff in fleet.hand_off_all(orders, PrefillTiming())]
        progress(f"{workload.num_slots} transfers at once, {num_rounds} times each")
        stress = StressOptions("many", workload.num_slots, num_rounds)
        tallies = ask_all([*fleet.sources, *fleet.targets], "stress", asdict(stress))
    alone = [figures(handoff, SerialTransfer({})) for handoff in handoffs]
    failures = sum((Counter(tally["failures"]) for tally in tallies), Counter[str]())
    return ControlResult(
        scene=workload,
        tth_s=[handoff.tth_s for handoff in alone],
        control_s=[handoff.control_s for handoff in alone],
        num_at_once=min(tally["num_at_once_max"] for tally in tallies),
        num_transfers=workload.num_slots * num_rounds,
        num_failed=failures.total(),
        num_held=sum(len(tally["held"]) for tally in tallies),
        num_bytes=sum(tally["num_bytes"] for tally in tallies),
        num_right=sum(tally["num_right"] for tally in tallies),
        elapsed_s=max(tally["elapsed_s"] for tally in tallies),
        failures=dict(failures),
    )
