"""Overlap policies beside each other: from little compute to much, on one throttled link, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from baton.bench.handoff.figures import Figures, Serial, figures
from baton.bench.handoff.fleet import Fleet, ask_all
from baton.bench.handoff.records import HandOver
from baton.bench.handoff.run import Options, calibrate, link_notes, paced, succeeded, total
from baton.bench.handoff.scene import Scene, Side
from baton.plan.execution import Verdict

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
POLICIES = ("cost", "adaptive", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "off")
MODEL = "paged:layers=32,heads=4,dim=64"
NUM_TOKENS = 4096
LINK_BYTES_PER_S = 160e6
OF_BOUND_TARGET = 0.95
BEHIND_TARGET = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one ratio of compute to transfer; medians over the runs."""

    ratio: float
    policy: str
    runs: list[Figures]

    def middle(self, name: str) -> float:
        """The median of a figure."""
        return float(median(getattr(run, name) for run in self.runs))

    @property
    def efficiency(self) -> float:
        """The median."""
        return self.middle("efficiency")

    @property
    def of_bound(self) -> float:
        """The median of efficiency by the bound of the same run."""
        return float(median(run.efficiency / run.bound if run.bound else 1.0 for run in self.runs))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every policy at every ratio."""

    scene: Scene
    serial: Serial
    rows: list[Row]
    verdict: Verdict
    notes: list[str]

    def at(self, ratio: float) -> dict[str, Row]:
        """The rows of one ratio by policy."""
        return {row.policy: row for row in self.rows if row.ratio == ratio}

    def behind(self, ratio: float) -> float:
        """By what part of its efficiency the best other policy is ahead of `cost`; below 0 it is not."""
        rows = self.at(ratio)
        best = max(row.efficiency for name, row in rows.items() if name != "cost")
        return 1 - rows["cost"].efficiency / best if best > 0 else 0.0

    @property
    def is_right(self) -> bool:
        """Whether every byte is."""
        return self.verdict.num_right == self.verdict.num_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """Rows by ratio and policy, and the two targets."""
        found = {}
        for ratio in dict.fromkeys(row.ratio for row in self.rows):
            rows = self.at(ratio)
            cost = rows["cost"]
            found[f"{ratio:g}"] = {
                "policies": {name: _row(row) for name, row in rows.items()},
                "cost_of_bound": cost.of_bound,
                "cost_of_bound_is_met": cost.of_bound >= OF_BOUND_TARGET,
                "cost_behind_best": self.behind(ratio),
                "cost_behind_best_is_met": self.behind(ratio) <= BEHIND_TARGET,
            }
        return {
            "scene": asdict(self.scene),
            "serial": {"transfer_s": dict(self.serial.transfer_s), "overhead_s": self.serial.overhead_s},
            "ratios": found,
            "bytes_compared": self.verdict.num_bytes,
            "bytes_right": self.verdict.num_right,
            "notes": self.notes,
        }


def _row(row: Row) -> dict[str, Any]:
    names = ("efficiency", "bound", "exposed_s", "tth_s", "compute_s", "transfer_s", "num_groups", "late_s")
    return {**{name: row.middle(name) for name in names}, "of_bound": row.of_bound, "runs": len(row.runs)}


def sweep_scene(transport: str, source: str, target: str) -> Scene:
    """32 layers behind a link that any transport here outruns by far."""
    sides = Side(source), Side(target)
    return Scene(MODEL, *sides, NUM_TOKENS, transport=transport, link_bytes_per_s=LINK_BYTES_PER_S)


def run(scene: Scene, options: Options, ratios: Sequence[float], tell: Callable[[str], None]) -> Sweep:
    """Policies take turns inside each ratio, so that other load falls on all of them alike."""
    tell("starting the processes")
    with Fleet(scene) as fleet:
        fleet.fill([0])
        tell("calibrating")
        serial = calibrate(fleet)
        found: dict[tuple[float, str], list[HandOver]] = {key: [] for key in product(ratios, POLICIES)}
        verdicts = []
        for ratio, index, policy in product(ratios, range(options.repeats), POLICIES):
            tell(f"C/T {ratio:g}, {policy}, {index + 1} of {options.repeats}")
            pace = paced(scene, serial, replace(options, policy=policy, ratio=ratio, layer_s=None))
            ask_all(fleet.targets, "wipe")
            found[ratio, policy].append(succeeded(fleet.hand_over(pace)))
            if not index:
                verdicts.append(fleet.compare())
    rows = [
        Row(ratio, policy, [figures(each, serial) for each in runs])
        for (ratio, policy), runs in found.items()
    ]
    notes = link_notes(scene, [each for runs in found.values() for each in runs])
    return Sweep(scene, serial, rows, total(verdicts), notes)
