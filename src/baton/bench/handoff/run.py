"""A paced hand-over between real processes, measured and compared byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from baton.bench.handoff.fleet import RankFleet, ask_all, total
from baton.bench.handoff.records import (
    Handoff,
    HandoffFigures,
    SerialTransfer,
    figures,
    inner_bytes_per_s,
    serial_of,
    timeline_of,
)
from baton.bench.handoff.workload import PrefillTiming, Workload, cache_of, fitted, room_bytes, schedule
from baton.bench.record import write
from baton.errors import EngineError
from baton.observe import NO_MATPLOTLIB, Timeline, draw, trace
from baton.plan.content import Verdict
from baton.plan.printer import human_bytes
from baton.plan.routes import resolve

NUM_CALIBRATIONS = 3
COLUMNS_MAX = 5
BOUND_TOLERANCE = 0.02
"""By how much an efficiency may be above its bound through rounding and single late copies."""


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """How hand-overs are paced and repeated."""

    policy: str = "cost"
    layer_s: float | None = None
    """Compute time of one layer of the whole prompt; None: from `ratio`."""
    ratio: float = 1.0
    """Compute over serial transfer time."""
    chunk_tokens: int = 0
    repeats: int = 3
    is_verified: bool = False


class HandoffReport(Protocol):
    """The result of one of the three measurements."""

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and every byte is right."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures has to know."""

    def table(self) -> Table:
        """The figures."""

    def summary(self) -> str:
        """One line."""

    def as_json(self) -> dict[str, Any]:
        """Everything but the timeline."""


@dataclass(frozen=True, slots=True)
class CaseRuns:
    """The hand-overs of one policy at one pace."""

    options: HandoffOptions
    pace: PrefillTiming
    handoffs: list[Handoff]
    runs: list[HandoffFigures]

    def median(self, name: str) -> float:
        """The median of a figure over the runs."""
        return float(median(getattr(run, name) for run in self.runs))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Paced hand-overs of one workload; every byte of each was compared."""

    workload: Workload
    serial: SerialTransfer
    cases: list[CaseRuns]
    verdict: Verdict
    notes: list[str]

    @property
    def is_right(self) -> bool:
        """Whether every byte is right."""
        return self.verdict.num_right == self.verdict.num_bytes > 0

    def common_json(self) -> dict[str, Any]:
        """Everything but the figures."""
        return {
            "scene": asdict(self.workload),
            "serial": {"transfer_s": dict(self.serial.transfer_s), "overhead_s": self.serial.overhead_s},
            "bytes_compared": self.verdict.num_bytes,
            "bytes_right": self.verdict.num_right,
            "notes": self.notes,
        }


class HandoffResult(Measurement):
    """Several runs of one hand-over."""

    @property
    def timeline(self) -> Timeline:
        """Of the run with the median tth."""
        handoffs = sorted(
            self.cases[0].handoffs, key=lambda handoff: handoff.received.settled_s - handoff.start_s
        )
        return timeline_of(handoffs[len(handoffs) // 2], self.workload.model)

    def as_json(self) -> dict[str, Any]:
        """Everything but the timeline."""
        (case,) = self.cases
        return {
            **self.common_json(),
            "pace": asdict(case.pace),
            "runs": [asdict(run) for run in case.runs],
            "median": {name: case.median(name) for name in HandoffFigures.__slots__},
        }

    def table(self) -> Table:
        """A column for each run."""
        (case,) = self.cases
        table = Table("", title=f"{title_of(self.workload)}, {case.pace.policy}")
        rows: dict[str, Callable[[HandoffFigures], str]] = {
            "tth": lambda run: ms(run.tth_s),
            "compute": lambda run: ms(run.compute_s),
            "exposed": lambda run: ms(run.exposed_s),
            "T": lambda run: ms(run.transfer_s),
            "efficiency": lambda run: f"{run.efficiency:.3f}",
            "bound": lambda run: f"{run.bound:.3f}",
            "control": lambda run: ms(run.control_s),
            "producer late": lambda run: ms(run.late_s),
            "groups": lambda run: str(run.num_groups),
            "copies": lambda run: str(run.num_copies),
            "spans": lambda run: str(run.num_spans),
            "bytes": lambda run: human_bytes(run.num_bytes),
        }
        columns = case.runs[:COLUMNS_MAX]
        for index in range(len(columns)):
            table.add_column(f"run {index + 1}", justify="right")
        for name, text in rows.items():
            table.add_row(name, *(text(run) for run in columns))
        return table

    def summary(self) -> str:
        """One line."""
        (case,) = self.cases
        num_bytes, num_wrong = self.verdict.num_bytes, self.verdict.num_bytes - self.verdict.num_right
        text = "every byte right" if self.is_right else f"{num_wrong} BYTES WRONG"
        return (
            f"tth {ms(case.median('tth_s'))}, exposed {ms(case.median('exposed_s'))} of T "
            f"{ms(case.median('transfer_s'))}, efficiency {case.median('efficiency'):.3f} of bound "
            f"{case.median('bound'):.3f}, control {ms(case.median('control_s'))}; {text} "
            f"({num_bytes} compared)"
        )


def ms(seconds: float) -> str:
    """Milliseconds for people."""
    return f"{seconds * 1e3:.2f} ms"


def title_of(workload: Workload) -> str:
    """A workload for people."""
    layouts = f"{workload.source.layout} to {workload.target.layout}"
    link = f", {workload.link_bytes_per_s / 1e9:g} GB/s a rank" if workload.link_bytes_per_s else ""
    return f"{workload.model}, {workload.num_tokens} tokens, {layouts} by {workload.transport}{link}"


def show(report: HandoffReport, path: Path) -> None:
    """Prints a report and writes its files; the last line is the summary."""
    console, table = Console(), report.table()
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    write(path, report.as_json())
    if isinstance(report, HandoffResult):
        events, picture = path.with_suffix(".trace.json"), path.with_suffix(".png")
        events.write_text(json.dumps(trace([report.timeline])) + "\n")
        print(f"timeline in {events} (open it in ui.perfetto.dev)")
        is_drawn = draw([report.timeline], picture, str(table.title))
        print(f"drawn in {picture}" if is_drawn else NO_MATPLOTLIB)
    print(report.summary())


def check(workload: Workload, options: HandoffOptions) -> None:
    """Raises on what cannot be measured, before anything is started."""
    schedule(workload, PrefillTiming(policy=options.policy, chunk_tokens=options.chunk_tokens))


Result = TypeVar("Result", bound=Measurement)


def run(
    result_type: type[Result],
    workload: Workload,
    turns: Sequence[Sequence[HandoffOptions]],
    progress: Callable[[str], None],
) -> Result:
    """Starts everything, hands over in every case, compares after each hand-over, and ends everything.

    The cases of one of `turns` take turns, so that other load falls on all of them.
    """
    kept = fitted(workload, room_bytes())
    notes = []
    if kept != workload:
        num_layers = cache_of(workload).num_layers
        notes.append(f"{kept.num_layers} of {num_layers} layers: memory has no room for more")
    handoffs: dict[HandoffOptions, list[Handoff]] = {case: [] for cases in turns for case in cases}
    verdicts = []
    progress("starting the processes")
    with RankFleet(kept) as fleet:
        progress("writing the source's pools")
        fleet.fill([0])
        progress("calibrating")
        serial = calibrate(fleet, turns[0][0].chunk_tokens)
        paces = {case: pace_of(kept, serial, case) for case in handoffs}
        for cases in turns:
            for index, case in product(range(cases[0].repeats), cases):
                progress(f"handing over, {case.policy}, {index + 1} of {case.repeats}")
                ask_all(fleet.targets, "wipe")
                handoff = fleet.hand_off(paces[case], is_verified=case.is_verified)
                handoffs[case].append(check_ready(handoff))
                verdicts.append(fleet.compare())
    measured = [
        CaseRuns(case, paces[case], runs, [figures(handoff, serial) for handoff in runs])
        for case, runs in handoffs.items()
    ]
    return result_type(
        workload=kept,
        serial=serial,
        cases=measured,
        verdict=total(verdicts),
        notes=[
            *notes,
            *link_notes(kept, [handoff for case in measured for handoff in case.handoffs]),
            *bound_notes(measured),
        ],
    )


def calibrate(fleet: RankFleet, chunk_tokens: int = 0) -> SerialTransfer:
    """The serial transfer time and the cost of each group, with the whole prompt ready."""
    fleet.hand_off(PrefillTiming())  # the first one connects
    whole = [check_ready(fleet.hand_off(PrefillTiming())) for _ in range(NUM_CALIBRATIONS)]
    by_layer = PrefillTiming(policy="fixed:1", chunk_tokens=chunk_tokens)
    return serial_of(whole, [check_ready(fleet.hand_off(by_layer)) for _ in range(NUM_CALIBRATIONS)])


def pace_of(workload: Workload, serial: SerialTransfer, options: HandoffOptions) -> PrefillTiming:
    """The layer time and the policy's view of the link, from the options and the calibration."""
    layer_s = options.layer_s
    if layer_s is None:
        layer_s = options.ratio * serial.busiest_s / cache_of(workload).num_layers
    return PrefillTiming(
        layer_s=layer_s,
        policy=options.policy,
        chunk_tokens=options.chunk_tokens,
        bytes_per_s=_bytes_per_s(workload, serial),
        overhead_s=serial.overhead_s,
    )


def _bytes_per_s(workload: Workload, serial: SerialTransfer) -> float:
    """The speed of the busiest rank."""
    rank = max(serial.transfer_s, key=lambda number: serial.transfer_s[number], default=None)
    if rank is None or not serial.transfer_s[rank]:
        return 1e9
    routes = workload.plan.narrowed(source=rank)
    num_bytes = sum(route.num_bytes for route in resolve(routes, workload.prompt))
    return max(1.0, num_bytes / serial.transfer_s[rank])


def check_ready(handoff: Handoff) -> Handoff:
    """The same hand-over; raises if it failed on a rank."""
    if not handoff.is_ready:
        raise EngineError(f"{handoff.transfer} was not handed over: {handoff.received.outcome}")
    for sent in handoff.sent.values():
        if sent.outcome != "ready":
            raise EngineError(f"{handoff.transfer}: source rank {sent.rank} saw {sent.outcome}")
    return handoff


def bound_notes(cases: Sequence[CaseRuns]) -> list[str]:
    """A note if an efficiency is above its bound.

    T and the bound are from the calibration. If copies run faster later, because the machine is less busy or
    because the ranks do not all send at once, less is exposed than the bound allows.
    """
    medians = [(case.median("efficiency"), case.median("bound")) for case in cases]
    efficiency, bound = max(medians, key=lambda pair: pair[0] - pair[1])
    if efficiency - bound <= BOUND_TOLERANCE:
        return []
    return [
        f"efficiency {efficiency:.3f} is above its bound {bound:.3f}: copies ran "
        "faster than in the calibration, which gives T and the bound; neither is reliable, so repeat this on "
        "an idle machine"
    ]


def link_notes(workload: Workload, handoffs: list[Handoff]) -> list[str]:
    """A note if the transport below the throttled link is slower than the link."""
    link = workload.link_bytes_per_s
    if not link or not handoffs:
        return []
    inner = median(inner_bytes_per_s(handoff) for handoff in handoffs)
    if inner >= 1.5 * link:
        return []
    text = "slower than" if inner < link else "hardly faster than"
    return [
        f"the transport under the link reached {inner / 1e6:.0f} MB/s a rank, {text} its "
        f"{link / 1e6:.0f} MB/s: transfer times are in part the transport's own"
    ]
