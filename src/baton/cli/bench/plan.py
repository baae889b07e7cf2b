"""`baton bench plan`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from baton.bench import plan as plan_bench
from baton.bench.record import write
from baton.cli.bench.options import Out, Repeats, progress_bar, result_path


def plan(
    repeats: Repeats = 7,
    out: Out = None,
) -> None:
    """Times planning and binding, and counts copies."""
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=None)
        for row in plan_bench.run(repeats):
            rows.append(row)
            progress.update(task, description=row.name)
    table = Table("measurement", "result", "target", title="baton bench plan")
    for row in rows:
        table.add_row(row.name, row.text, {None: "", True: "met", False: "missed"}[row.is_met])
    Console().print(table)
    path = result_path("plan", out)
    write(path, {row.name: {**row.figures, "is_met": row.is_met} for row in rows})
    print(f"written to {path}")
