"""Figures of hand-overs by policy, against compute alone in the same run.

floor        compute-only: the same prompt prefilled by the same instance, with nothing handed over
T            serial transfer time: of `off`, from the end of compute to the last byte
efficiency   1 - exposed / T
bound        the efficiency of one-layer groups without overhead, at the layer times of the same request
state        what recurrent state takes of T, and what is exposed beyond what the bound would expose if there
             were none: no more than that is to be added
complete     begin of compute to the last byte, by the floor of the same round
slow-down    compute beside the copies, by the floor of the same round, less 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from baton.engine.trace import HandoffTrace, serial_s

LONG_TOKENS = 4096
OF_BOUND_LONG = 0.95
OF_BOUND_SHORT = 0.85
OF_BOUND_STATES = 0.9
"""Of models with recurrent state, on a CPU."""
COMPLETE_TARGET = 1.04
SLOWED_TARGET = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt length on a link."""

    num_tokens: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One hand-over, and compute-only of the same round."""

    told: HandoffTrace
    floor_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One hand-over in numbers; see the head of this file."""

    tth_s: float
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
    """What is exposed beyond what the bound would expose without states."""

    @property
    def of_bound(self) -> float:
        """Efficiency by bound."""
        return self.efficiency / self.bound if self.bound > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one case."""

    case: Case
    policy: str
    runs: list[Run]
    floor_s: float
    serial_s: float
    state_s: float = 0.0
    """What recurrent state takes of the serial transfer time."""

    def middle(self, value: Callable[[Run], float]) -> float:
        """The median over the runs."""
        return float(median(value(run) for run in self.runs))

    @property
    def of_bound(self) -> float:
        """The median of efficiency by bound."""
        return self.middle(lambda run: run.of_bound)

    def as_json(self) -> dict[str, Any]:
        """Medians, and every run."""
        names = Run.__slots__
        return {
            "tokens": self.case.num_tokens,
            "link_bytes_per_s": self.case.link_bytes_per_s,
            "policy": self.policy,
            "compute_only_s": self.floor_s,
            "serial_transfer_s": self.serial_s,
            "state_transfer_s": self.state_s,
            **{name: float(median(getattr(run, name) for run in self.runs)) for name in names},
            "of_bound": self.of_bound,
            "runs": [{name: getattr(run, name) for name in names} for run in self.runs],
        }


def rows_of(case: Case, rounds: dict[str, list[Round]], off: str) -> list[Row]:
    """A row for each policy, held to the transfer time of the policy `off`."""
    by_rank: dict[int, list[float]] = {}
    for each in rounds[off]:
        for rank, seconds in serial_s(each.told.prefill).items():
            by_rank.setdefault(rank, []).append(seconds)
    serial = {rank: median(seconds) for rank, seconds in by_rank.items()}
    floor_s = median(each.floor_s for each in rounds[off])
    total_s = max(serial.values(), default=0.0)
    state_s = total_s * median(each.told.state_share() for each in rounds[off])
    return [
        Row(case, policy, [_run(each, serial) for each in found], floor_s, total_s, state_s)
        for policy, found in rounds.items()
    ]


def _run(found: Round, serial: dict[int, float]) -> Run:
    told, figures = found.told, found.told.figures()
    total_s = max(serial.values(), default=0.0)
    return Run(
        tth_s=figures.tth_s,
        ttft_s=figures.ttft_s,
        compute_s=figures.compute_s,
        exposed_s=figures.exposed_s,
        admission_s=figures.admission_s,
        efficiency=1 - figures.exposed_s / total_s if total_s else 1.0,
        bound=told.bound(serial),
        complete=(figures.compute_s + figures.exposed_s) / found.floor_s,
        slowed=figures.compute_s / found.floor_s - 1,
        num_groups=figures.num_groups,
        num_bytes=figures.num_bytes,
        beyond_s=figures.exposed_s - told.least_exposed_s(serial, has_states=False),
    )


def targets(rows: Sequence[Row], policy: str, device: str) -> dict[str, dict[str, Any]]:
    """What is asked of a policy, with whether it is met; by prompt length and link."""
    found = {}
    for row in rows:
        if row.policy != policy:
            continue
        is_long = row.case.num_tokens >= LONG_TOKENS
        least = OF_BOUND_LONG if is_long and device != "cpu" else OF_BOUND_SHORT
        if row.state_s and device == "cpu":
            least = OF_BOUND_STATES
        told: dict[str, Any] = {"of_bound": row.of_bound, "of_bound_is_met": row.of_bound >= least}
        if row.state_s:
            beyond_s = row.middle(lambda run: run.beyond_s)
            told |= {"state_s": row.state_s, "beyond_s": beyond_s, "beyond_is_met": beyond_s <= row.state_s}
        if device != "cpu" and is_long:
            slowed, complete = row.middle(lambda run: run.slowed), row.middle(lambda run: run.complete)
            told |= {"slowed": slowed, "slowed_is_met": slowed <= SLOWED_TARGET}
            if row.serial_s <= row.floor_s:
                told |= {"complete": complete, "complete_is_met": complete <= COMPLETE_TARGET}
        found[case_text(row.case)] = told
    return found


def link_text(bytes_per_s: float) -> str:
    """A speed for people."""
    if not bytes_per_s:
        return "full speed"
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def case_text(case: Case) -> str:
    """A case for people."""
    return f"{case.num_tokens} tokens, {link_text(case.link_bytes_per_s)}"
