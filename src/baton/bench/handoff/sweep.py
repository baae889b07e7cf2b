"""All overlap policies, from little compute to much, on one throttled link, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from rich.table import Table

from baton.bench.handoff.fleet import Fleet, ask_all
from baton.bench.handoff.records import HandoffFigures, HandOver, SerialTransfer, figures
from baton.bench.handoff.run import HandoffOptions, calibrate, check_ready, link_notes, ms, pace_of, title_of
from baton.bench.handoff.run import total as total_verdict
from baton.bench.handoff.workload import SideSpec, Workload
from baton.plan.content import Verdict

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
POLICIES = ("cost", "adaptive", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "off")
MODEL = "paged:layers=32,heads=4,dim=64"
NUM_TOKENS = 4096
LINK_BYTES_PER_S = 160e6
OF_BOUND_TARGET = 0.95
BEHIND_TARGET = 0.02


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One policy at one ratio of compute to transfer."""

    ratio: float
    policy: str
    runs: list[HandoffFigures]

    def median(self, name: str) -> float:
        """The median of a figure over the runs."""
        return float(median(getattr(run, name) for run in self.runs))

    @property
    def efficiency(self) -> float:
        """The median efficiency."""
        return self.median("efficiency")

    @property
    def of_bound(self) -> float:
        """The median of efficiency over the bound of the same run."""
        return float(median(run.efficiency / run.bound if run.bound else 1.0 for run in self.runs))

    def as_json(self) -> dict[str, Any]:
        """Medians."""
        names = ("efficiency", "bound", "exposed_s", "tth_s", "compute_s", "transfer_s")
        medians = {name: self.median(name) for name in (*names, "num_groups", "late_s")}
        return {**medians, "of_bound": self.of_bound, "runs": len(self.runs)}


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Every policy at every ratio."""

    workload: Workload
    serial: SerialTransfer
    rows: list[SweepRow]
    verdict: Verdict
    notes: list[str]

    @property
    def ratios(self) -> list[float]:
        """Every ratio, in order."""
        return list(dict.fromkeys(row.ratio for row in self.rows))

    def at(self, ratio: float) -> dict[str, SweepRow]:
        """The rows of one ratio by policy."""
        return {row.policy: row for row in self.rows if row.ratio == ratio}

    def behind(self, ratio: float) -> float:
        """By what share of its efficiency the best other policy is ahead of `cost`; below 0 it is not."""
        rows = self.at(ratio)
        best = max(row.efficiency for name, row in rows.items() if name != "cost")
        return 1 - rows["cost"].efficiency / best if best > 0 else 0.0

    @property
    def is_right(self) -> bool:
        """Whether every byte is right."""
        return self.verdict.num_right == self.verdict.num_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """Rows by ratio and policy, and the two targets."""
        by_ratio = {}
        for ratio in self.ratios:
            rows, behind = self.at(ratio), self.behind(ratio)
            of_bound = rows["cost"].of_bound
            by_ratio[f"{ratio:g}"] = {
                "policies": {name: row.as_json() for name, row in rows.items()},
                "cost_of_bound": of_bound,
                "cost_of_bound_is_met": of_bound >= OF_BOUND_TARGET,
                "cost_behind_best": behind,
                "cost_behind_best_is_met": behind <= BEHIND_TARGET,
            }
        return {
            "scene": asdict(self.workload),
            "serial": {"transfer_s": dict(self.serial.transfer_s), "overhead_s": self.serial.overhead_s},
            "ratios": by_ratio,
            "bytes_compared": self.verdict.num_bytes,
            "bytes_right": self.verdict.num_right,
            "notes": self.notes,
        }

    def table(self) -> Table:
        """Efficiency of every policy by ratio, with the bound."""
        table = Table("", title=f"efficiency, {title_of(self.workload)}")
        rows = {ratio: self.at(ratio) for ratio in self.ratios}
        for ratio in rows:
            table.add_column(f"C/T {ratio:g}", justify="right")
        costs = [by_policy["cost"] for by_policy in rows.values()]
        table.add_row("bound", *(f"{cost.median('bound'):.3f}" for cost in costs))
        for policy in dict.fromkeys(row.policy for row in self.rows):
            table.add_row(policy, *(f"{by_policy[policy].efficiency:.3f}" for by_policy in rows.values()))
        table.add_section()
        table.add_row("cost of bound", *(f"{cost.of_bound:.3f}" for cost in costs))
        table.add_row("cost behind best", *(f"{self.behind(ratio) * 100:+.1f}%" for ratio in rows))
        table.add_row("groups of cost", *(f"{cost.median('num_groups'):g}" for cost in costs))
        return table

    def summary(self) -> str:
        """One line."""
        least = min(self.at(ratio)["cost"].of_bound for ratio in self.ratios)
        behind = max(self.behind(ratio) for ratio in self.ratios)
        text = "every byte right" if self.is_right else "BYTES WRONG"
        return (
            f"cost reaches at least {least:.3f} of bound (target 0.95) and is at most {behind * 100:.1f}% "
            f"behind another policy (target 2%); T {ms(self.serial.busiest_s)}, "
            f"{ms(self.serial.overhead_s)} per group; {text}"
        )


def sweep_workload(transport: str, source: str, target: str) -> Workload:
    """32 layers behind a link that is much slower than any transport."""
    sides = SideSpec(source), SideSpec(target)
    return Workload(MODEL, *sides, NUM_TOKENS, transport=transport, link_bytes_per_s=LINK_BYTES_PER_S)


def run(
    workload: Workload, options: HandoffOptions, ratios: Sequence[float], progress: Callable[[str], None]
) -> SweepResult:
    """Policies take turns within each ratio, so that other load falls on all of them."""
    progress("starting the processes")
    with Fleet(workload) as fleet:
        fleet.fill([0])
        progress("calibrating")
        serial = calibrate(fleet)
        handovers: dict[tuple[float, str], list[HandOver]] = {key: [] for key in product(ratios, POLICIES)}
        verdicts = []
        for ratio, index, policy in product(ratios, range(options.repeats), POLICIES):
            progress(f"C/T {ratio:g}, {policy}, {index + 1} of {options.repeats}")
            pace = pace_of(workload, serial, replace(options, policy=policy, ratio=ratio, layer_s=None))
            ask_all(fleet.targets, "wipe")
            handovers[ratio, policy].append(check_ready(fleet.hand_over(pace)))
            if not index:
                verdicts.append(fleet.compare())
    rows = [
        SweepRow(ratio, policy, [figures(handover, serial) for handover in runs])
        for (ratio, policy), runs in handovers.items()
    ]
    notes = link_notes(workload, [handover for runs in handovers.values() for handover in runs])
    return SweepResult(workload, serial, rows, total_verdict(verdicts), notes)
