"""All overlap policies, from little compute to much, on one throttled link, in one run."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from rich.table import Table

from baton.bench.handoff.run import CaseRuns, HandoffOptions, Measurement, ms, title_of
from baton.bench.handoff.workload import SideSpec, Workload

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
POLICIES = ("cost", "adaptive", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "off")
MODEL = "paged:layers=32,heads=4,dim=64"
NUM_TOKENS = 4096
LINK_BYTES_PER_S = 160e6
FIGURES = ("efficiency", "bound", "exposed_s", "tth_s", "compute_s", "transfer_s", "num_groups", "late_s")
OF_BOUND_TARGET = 0.95
BEHIND_TARGET = 0.02


def of_bound(case: CaseRuns) -> float:
    """The median of efficiency over the bound of the same run."""
    return median(run.efficiency / run.bound if run.bound else 1.0 for run in case.runs)


class SweepResult(Measurement):
    """Every policy at every ratio of compute to transfer."""

    @property
    def ratios(self) -> list[float]:
        """Every ratio, in order."""
        return list(dict.fromkeys(case.options.ratio for case in self.cases))

    def at(self, ratio: float) -> dict[str, CaseRuns]:
        """The cases of one ratio by policy."""
        return {case.options.policy: case for case in self.cases if case.options.ratio == ratio}

    def behind(self, ratio: float) -> float:
        """By what share of its efficiency the best other policy is ahead of `cost`; below 0 it is not."""
        efficiencies = {name: case.median("efficiency") for name, case in self.at(ratio).items()}
        own, best = efficiencies.pop("cost"), max(efficiencies.values())
        return 1 - own / best if best > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Cases by ratio and policy, and the two targets."""
        by_ratio = {}
        for ratio in self.ratios:
            cases, behind = self.at(ratio), self.behind(ratio)
            cost_of_bound = of_bound(cases["cost"])
            by_ratio[f"{ratio:g}"] = {
                "policies": {
                    name: {figure: case.median(figure) for figure in FIGURES}
                    | {"of_bound": of_bound(case), "runs": len(case.runs)}
                    for name, case in cases.items()
                },
                "cost_of_bound": cost_of_bound,
                "cost_of_bound_is_met": cost_of_bound >= OF_BOUND_TARGET,
                "cost_behind_best": behind,
                "cost_behind_best_is_met": behind <= BEHIND_TARGET,
            }
        return {**self.common_json(), "ratios": by_ratio}

    def table(self) -> Table:
        """Efficiency of every policy by ratio, with the bound."""
        table = Table("", title=f"efficiency, {title_of(self.workload)}")
        rows = {ratio: self.at(ratio) for ratio in self.ratios}
        for ratio in rows:
            table.add_column(f"C/T {ratio:g}", justify="right")
        costs = [by_policy["cost"] for by_policy in rows.values()]
        table.add_row("bound", *(f"{cost.median('bound'):.3f}" for cost in costs))
        for policy in rows[self.ratios[0]]:
            efficiencies = (by_policy[policy].median("efficiency") for by_policy in rows.values())
            table.add_row(policy, *(f"{efficiency:.3f}" for efficiency in efficiencies))
        table.add_section()
        table.add_row("cost of bound", *(f"{of_bound(cost):.3f}" for cost in costs))
        table.add_row("cost behind best", *(f"{self.behind(ratio) * 100:+.1f}%" for ratio in rows))
        table.add_row("groups of cost", *(f"{cost.median('num_groups'):g}" for cost in costs))
        return table

    def summary(self) -> str:
        """One line."""
        least = min(of_bound(self.at(ratio)["cost"]) for ratio in self.ratios)
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


def sweep_cases(options: HandoffOptions) -> list[list[HandoffOptions]]:
    """Every policy at every ratio; the policies of one ratio take turns."""
    return [
        [replace(options, policy=policy, ratio=ratio, layer_s=None) for policy in POLICIES]
        for ratio in RATIOS
    ]
