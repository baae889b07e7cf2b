"""The measurement with its table, its files and its last line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from baton.bench.overlap import run
from baton.bench.overlap.figures import targets
from baton.bench.overlap.options import COST, Options
from baton.bench.overlap.picture import draw
from baton.bench.overlap.printer import summary_of, table_of
from baton.bench.overlap.run import Measured
from baton.bench.record import write

WIDTH_MIN = 132
PROGRESS = Callable[[int, str], None]
"""Is told how many steps there are, and at each what is done."""


def check(options: Options) -> None:
    """Raises on what would be refused, before anything is started."""
    run.check(options)


def measure(options: Options, progress: PROGRESS) -> Measured:
    """Everything."""
    total = run.num_steps(options)
    return run.run(options, lambda text: progress(total, text))


def show(found: Measured, options: Options, path: Path, picture: Path | None) -> None:
    """Prints and writes everything; the last line is the summary."""
    rows = found.rows
    # A table that is cut to 80 columns says nothing.
    Console(width=max(Console().width, WIDTH_MIN)).print(table_of(rows, options))
    write(path, record_of(found, options))
    print(f"written to {path}")
    if picture is not None:
        title = f"{options.model}, {options.prefill} to {options.decode}"
        if draw(rows, picture, title):
            print(f"drawn in {picture}")
        else:
            print("no picture: matplotlib is not installed (pip install 'baton[plot]')")
    compared = found.compared
    print(f"tokens identical: {compared.num_identical} of {compared.num_tokens}")
    print(summary_of(rows))


def record_of(found: Measured, options: Options) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "options": asdict(options),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "tokens_compared": found.compared.num_tokens,
        "tokens_identical": found.compared.num_identical,
        "rows": [row.as_json() for row in found.rows],
        "targets": targets(found.rows, COST, options.device),
    }
