"""Figures of hand-overs by policy, against compute alone in the same round; their table, summary and picture.

compute-only   the same prompt prefilled by the same instance, with nothing handed over
tth/compute    time to hand-over (request in to admitted on decode) over compute-only: what a client sees
against off    tth over the tth of `off`, less 1; above 0 the policy loses to `off`
T              serial transfer time: of `off`, from the end of compute to the last byte
efficiency     1 - exposed / T
bound          the efficiency of one-layer groups without overhead, at the layer times of the same request
complete       start of compute to the last byte, over compute-only
slow-down      compute beside the copies over compute-only, less 1
state          the part of T that recurrent states take. `beyond_s` is what is exposed beyond what the bound
               would expose without states; it should be at most that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from baton.engine.trace import HandoffTrace, serial_s

OFF, COST = "off", "cost"
LONG_TOKENS = 4096
OF_BOUND_LONG = 0.95
OF_BOUND_SHORT = 0.85
OF_BOUND_STATES = 0.9
"""For models with recurrent state, on a CPU."""
COMPLETE_TARGET = 1.04
SLOWED_TARGET = 0.02


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A prompt length on a link."""

    num_tokens: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OverlapRound:
    """The trace of one hand-over, and compute-only of the same round."""

    trace: HandoffTrace
    compute_only_s: float


@dataclass(frozen=True, slots=True)
class OverlapRun:
    """One hand-over in figures; see the head of this file."""

    tth_s: float
    tth_over_compute: float
    ttft_s: float
    compute_s: float
    exposed_s: float
    admission_s: float
    efficiency: float
    bound: float
    complete: float
    slowed: float
    num_groups: int
    num_bytes: int
    beyond_s: float

    @property
    def of_bound(self) -> float:
        """Efficiency over bound."""
        return self.efficiency / self.bound if self.bound > 0 else 1.0


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One policy in one case."""

    case: OverlapCase
    policy: str
    runs: list[OverlapRun]
    compute_only_s: float
    serial_s: float
    state_s: float = 0.0
    """The part of the serial transfer time that recurrent states take."""

    def median(self, value: Callable[[OverlapRun], float]) -> float:
        """The median over the runs."""
        return float(median(value(run) for run in self.runs))

    @property
    def tth_s(self) -> float:
        """The median tth."""
        return self.median(lambda run: run.tth_s)

    @property
    def tth_over_compute(self) -> float:
        """The median of tth over compute-only."""
        return self.median(lambda run: run.tth_over_compute)

    @property
    def of_bound(self) -> float:
        """The median of efficiency over bound."""
        return self.median(lambda run: run.of_bound)

    def as_json(self) -> dict[str, Any]:
        """Medians, and every run."""
        names = OverlapRun.__slots__
        return {
            "tokens": self.case.num_tokens,
            "link_bytes_per_s": self.case.link_bytes_per_s,
            "policy": self.policy,
            "compute_only_s": self.compute_only_s,
            "serial_transfer_s": self.serial_s,
            "state_transfer_s": self.state_s,
            **{name: float(median(getattr(run, name) for run in self.runs)) for name in names},
            "of_bound": self.of_bound,
            "runs": [{name: getattr(run, name) for name in names} for run in self.runs],
        }


def rows_of(case: OverlapCase, rounds: dict[str, list[OverlapRound]]) -> list[OverlapRow]:
    """A row for each policy, compared with the transfer time of `off`."""
    by_rank: dict[int, list[float]] = {}
    for off in rounds[OFF]:
        for rank, seconds in serial_s(off.trace.prefill).items():
            by_rank.setdefault(rank, []).append(seconds)
    serial = {rank: median(seconds) for rank, seconds in by_rank.items()}
    compute_only_s = median(off.compute_only_s for off in rounds[OFF])
    total_s = max(serial.values(), default=0.0)
    state_s = total_s * median(off.trace.state_share() for off in rounds[OFF])
    return [
        OverlapRow(
            case,
            policy,
            [_run(overlap_round, serial) for overlap_round in policy_rounds],
            compute_only_s,
            total_s,
            state_s,
        )
        for policy, policy_rounds in rounds.items()
    ]


def _run(one_round: OverlapRound, serial: dict[int, float]) -> OverlapRun:
    trace, figures, compute_only_s = one_round.trace, one_round.trace.figures(), one_round.compute_only_s
    total_s = max(serial.values(), default=0.0)
    return OverlapRun(
        tth_s=figures.tth_s,
        tth_over_compute=figures.tth_s / compute_only_s,
        ttft_s=figures.ttft_s,
        compute_s=figures.compute_s,
        exposed_s=figures.exposed_s,
        admission_s=figures.admission_s,
        efficiency=1 - figures.exposed_s / total_s if total_s else 1.0,
        bound=trace.bound(serial),
        complete=(figures.compute_s + figures.exposed_s) / compute_only_s,
        slowed=figures.compute_s / compute_only_s - 1,
        num_groups=figures.num_groups,
        num_bytes=figures.num_bytes,
        beyond_s=figures.exposed_s - trace.least_exposed_s(serial, has_states=False),
    )


def targets(rows: Sequence[OverlapRow], policy: str, device: str) -> dict[str, dict[str, Any]]:
    """The targets of a policy and whether each is met, by case."""
    by_case = {}
    for row in rows:
        if row.policy != policy:
            continue
        is_long = row.case.num_tokens >= LONG_TOKENS
        least = OF_BOUND_LONG if is_long and device != "cpu" else OF_BOUND_SHORT
        if row.state_s and device == "cpu":
            least = OF_BOUND_STATES
        figures: dict[str, Any] = {"of_bound": row.of_bound, "of_bound_is_met": row.of_bound >= least}
        if row.state_s:
            beyond_s = row.median(lambda run: run.beyond_s)
            figures |= {"state_s": row.state_s, "beyond_s": beyond_s}
            figures["beyond_is_met"] = beyond_s <= row.state_s
        if device != "cpu" and is_long:
            slowed, complete = row.median(lambda run: run.slowed), row.median(lambda run: run.complete)
            figures |= {"slowed": slowed, "slowed_is_met": slowed <= SLOWED_TARGET}
            if row.serial_s <= row.compute_only_s:
                figures |= {"complete": complete, "complete_is_met": complete <= COMPLETE_TARGET}
        by_case[case_text(row.case)] = figures
    return by_case


def losses(rows: Sequence[OverlapRow]) -> list[tuple[OverlapRow, OverlapRow]]:
    """Each row whose tth is longer than that of `off` in the same case, with the row of `off`."""
    offs = {row.case: row for row in rows if row.policy == OFF}
    return [(row, offs[row.case]) for row in rows if row.case in offs and row.tth_s > offs[row.case].tth_s]


def table_of(rows: Sequence[OverlapRow], title: str) -> Table:
    """A row for each policy; sections by prompt length and link."""
    heads = (
        *("tth", "tth/compute", "against off", "compute", "exposed"),
        *("efficiency", "bound", "of bound", "complete", "slow-down", "groups"),
    )
    table = Table("tokens", "link", "policy", title=title)
    for head in heads:
        table.add_column(head, justify="right")
    offs = {row.case: row for row in rows if row.policy == OFF}
    last = None
    for row in rows:
        if row.case != last:
            last = row.case
            table.add_section()
            place = (str(row.case.num_tokens), link_text(row.case.link_bytes_per_s))
            table.add_row(
                *(*place, "compute-only", "", "", ""), _ms(row.compute_only_s), _ms(row.serial_s) + " = T"
            )
        off = offs.get(row.case)
        against_off = "" if off is None or off is row else f"{(row.tth_s / off.tth_s - 1) * 100:+.1f}%"
        table.add_row(
            *("", "", row.policy, _ms(row.tth_s), f"{row.tth_over_compute:.3f}", against_off),
            _ms(row.median(lambda run: run.compute_s)),
            _ms(row.median(lambda run: run.exposed_s)),
            f"{row.median(lambda run: run.efficiency):.3f}",
            f"{row.median(lambda run: run.bound):.3f}",
            f"{row.of_bound:.3f}",
            f"{row.median(lambda run: run.complete):.3f}",
            f"{row.median(lambda run: run.slowed) * 100:+.1f}%",
            f"{row.median(lambda run: run.num_groups):g}",
        )
    return table


def summary_lines(rows: Sequence[OverlapRow]) -> list[str]:
    """tth over compute-only first, then efficiency against its bound, then where a policy loses to `off`."""
    cost = [row for row in rows if row.policy == COST]
    lines = ["cost was not measured"]
    if cost:
        slowest = max(cost, key=lambda row: row.tth_over_compute)
        least = min(cost, key=lambda row: row.of_bound)
        complete = max(row.median(lambda run: run.complete) for row in cost)
        lines = [
            f"cost: tth at most {slowest.tth_over_compute:.3f} times compute-only "
            f"({case_text(slowest.case)})",
            f"cost: at least {least.of_bound:.3f} of bound ({case_text(least.case)}), "
            f"the last byte within {complete:.3f} times compute-only",
        ]
    slower = losses(rows)
    for row, off in slower:
        lines.append(
            f"{row.policy} is slower than off at {case_text(row.case)}: "
            f"tth {_ms(row.tth_s)} against {_ms(off.tth_s)}"
        )
    if any(row.policy != OFF for row in rows) and not slower:
        lines.append("no policy is slower than off")
    return lines


def link_text(bytes_per_s: float) -> str:
    """A link speed for people."""
    if not bytes_per_s:
        return "full speed"
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def case_text(case: OverlapCase) -> str:
    """A case for people."""
    return f"{case.num_tokens} tokens, {link_text(case.link_bytes_per_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def paint(pyplot: Any, rows: Sequence[OverlapRow], title: str) -> Any:
    """By link: tth over compute-only, and efficiency."""
    speeds = list(dict.fromkeys(row.case.link_bytes_per_s for row in rows))
    size = (9.0, 1.0 + 2.8 * len(speeds))
    figure, grid = pyplot.subplots(len(speeds), 2, figsize=size, layout="constrained", squeeze=False)
    for speed, (left, right) in zip(speeds, grid, strict=True):
        of_speed = [row for row in rows if row.case.link_bytes_per_s == speed]
        lengths = list(dict.fromkeys(row.case.num_tokens for row in of_speed))
        for policy in dict.fromkeys(row.policy for row in of_speed):
            line = [row for row in of_speed if row.policy == policy]
            _plot(left, [row.tth_over_compute for row in line], policy)
            _plot(right, [row.median(lambda run: run.efficiency) for row in line], policy)
        last = [row for row in of_speed if row.policy == of_speed[-1].policy]
        bounds = [row.median(lambda run: run.bound) for row in last]
        right.plot(range(len(bounds)), bounds, color="black", linestyle="--", label="bound")
        left.axhline(1.0, color="black", linestyle="--", linewidth=1)
        left.set_title(f"{link_text(speed)}: tth over compute-only", fontsize=9, loc="left")
        right.set_title(f"{link_text(speed)}: efficiency", fontsize=9, loc="left")
        for axes in (left, right):
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_xlabel("tokens")
            axes.grid(axis="y", linewidth=0.3)
    grid[0][1].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=9)
    return figure


def _plot(axes: Any, values: Sequence[float], label: str) -> None:
    axes.plot(range(len(values)), values, marker="o", markersize=3, linewidth=1.2, label=label)
