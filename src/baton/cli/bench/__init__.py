"""`baton bench`: measured claims, each with its command, machine and commit."""

from __future__ import annotations

import typer

from baton.cli.bench.engine import engine
from baton.cli.bench.handoff import handoff
from baton.cli.bench.overlap import overlap
from baton.cli.bench.plan import plan
from baton.cli.bench.serve import serve
from baton.cli.bench.transport import transport

app = typer.Typer(help="Measures what Baton claims.")


@app.callback()
def bench() -> None:
    """Measures what Baton claims."""


for command in (plan, transport, handoff, overlap, engine, serve):
    app.command()(command)
