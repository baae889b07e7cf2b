"""`baton bench`: measured claims, each with its command, machine and commit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.plan import run
from baton.bench.record import write

app = typer.Typer(help="Measures what Baton claims.")

RESULTS = Path("benchmarks/results")


@app.callback()
def bench() -> None:
    """Measures what Baton claims."""


@app.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="runs of each measurement")] = 7,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
) -> None:
    """Times planning and binding, and counts copies."""
    rows = []
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=None)
        for row in run(repeats):
            rows.append(row)
            progress.update(task, description=row.name)
    table = Table("measurement", "result", "target", title="baton bench plan")
    for row in rows:
        table.add_row(row.name, row.text, {None: "", True: "met", False: "missed"}[row.is_met])
    Console(width=None).print(table)
    path = out or RESULTS / f"plan-{datetime.now(UTC):%Y-%m-%d}.json"
    write(path, {row.name: {**row.figures, "is_met": row.is_met} for row in rows})
    print(f"written to {path}")
