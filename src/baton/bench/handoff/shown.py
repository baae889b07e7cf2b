"""The three measurements of `baton bench handoff`, each with its table, its files and its last line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.handoff import control, printer, run, sweep
from baton.bench.handoff.run import Options
from baton.bench.handoff.scene import Scene
from baton.bench.record import write
from baton.observe import Timeline, trace
from baton.observe.picture import draw

NUM_ALONE = 100
NUM_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Shown:
    """A finished measurement."""

    name: str
    table: Table
    summary: str
    record: dict[str, Any]
    is_right: bool
    notes: list[str]
    timeline: Timeline | None = None

    def show(self, console: Console, path: Path) -> None:
        """Prints it and writes its files; the last line is the summary."""
        console.print(self.table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        write(path, self.record)
        print(f"written to {path}")
        if self.timeline is not None:
            _write_timeline(self.timeline, path, str(self.table.title))
        print(self.summary)


def _write_timeline(timeline: Timeline, path: Path, title: str) -> None:
    events = path.with_suffix(".trace.json")
    events.write_text(json.dumps(trace([timeline])) + "\n")
    print(f"timeline in {events} (open it in ui.perfetto.dev)")
    if draw([timeline], path.with_suffix(".png"), title):
        print(f"drawn in {path.with_suffix('.png')}")
    else:
        print("no picture: matplotlib is not installed (pip install 'baton[plot]')")


def measure_one(scene: Scene, options: Options, tell: Callable[[str], None]) -> Shown:
    """One hand-over, repeated."""
    found = run.run(scene, options, tell)
    return Shown(
        name="handoff",
        table=printer.measured_table(found),
        summary=printer.measured_summary(found),
        record=found.as_json(),
        is_right=found.is_right,
        notes=found.notes,
        timeline=found.timeline,
    )


def measure_control(scene: Scene, options: Options, tell: Callable[[str], None]) -> Shown:
    """Tiny transfers between the scene's layouts."""
    del options
    small = control.small_scene(scene.transport, scene.source.layout, scene.target.layout)
    found = control.run(small, NUM_ALONE, NUM_ROUNDS, tell)
    return Shown(
        name="handoff-control",
        table=printer.control_table(found),
        summary=printer.control_summary(found),
        record=found.as_json(),
        is_right=found.is_right,
        notes=[],
    )


def measure_sweep(scene: Scene, options: Options, tell: Callable[[str], None]) -> Shown:
    """Every policy at every ratio, between the scene's layouts."""
    wide = sweep.sweep_scene(scene.transport, scene.source.layout, scene.target.layout)
    found = sweep.run(wide, options, sweep.RATIOS, tell)
    return Shown(
        name="handoff-sweep",
        table=printer.sweep_table(found),
        summary=printer.sweep_summary(found),
        record=found.as_json(),
        is_right=found.is_right,
        notes=found.notes,
    )
