"""The measurement with its table, its files and its last line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.engine import run
from baton.bench.engine.options import Options
from baton.bench.engine.run import DECODE_TARGET, PREFILL_TARGET, Measured, Turn
from baton.bench.record import write
from baton.observe.plotting import load_pyplot


def check(options: Options) -> None:
    """Raises on what would be refused, before anything is started."""
    run.check(options)


def measure(options: Options, progress: Callable[[int, str], None]) -> Measured:
    """Both measurements."""
    total = run.num_steps(options)
    return run.run(options, lambda text: progress(total, text))


def show(found: Measured, options: Options, path: Path, picture: Path | None) -> None:
    """Prints and writes everything; the last line is the summary."""
    Console().print(_table(found, options))
    versions = {
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
    }
    write(path, {"options": asdict(options), **versions, **found.as_json()})
    print(f"written to {path}")
    if picture is not None:
        print(f"drawn in {picture}" if _draw(found, options, picture) else "no picture without matplotlib")
    print(
        f"prefill {found.prefill.ratio:.2f} times transformers ({PREFILL_TARGET:g} wanted), "
        f"decode of {options.num_requests} {found.decode.ratio:.2f} times its one ({DECODE_TARGET:g}); "
        f"tokens identical: {found.num_identical} of {found.num_tokens}"
    )


def _table(found: Measured, options: Options) -> Table:
    title = f"{options.model}, {options.dtype}, {options.num_threads} threads, tokens per second"
    table = Table("", title=title)
    for head in ("engine", "transformers", "ratio", "target"):
        table.add_column(head, justify="right")
    for name, turn, target in _rows(found, options):
        word = "met" if turn.ratio >= target else "missed"
        texts = (f"{turn.engine_per_s:.1f}", f"{turn.peer_per_s:.1f}", f"{turn.ratio:.2f}")
        table.add_row(name, *texts, f"{target:g}: {word}")
    return table


def _rows(found: Measured, options: Options) -> list[tuple[str, Turn, float]]:
    return [
        (f"prefill of {options.num_prompt}", found.prefill, PREFILL_TARGET),
        (f"decode, {options.num_requests} requests against 1", found.decode, DECODE_TARGET),
    ]


def _draw(found: Measured, options: Options, path: Path) -> bool:
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(7, 3), layout="constrained")
    for each, (name, turn, _) in zip(axes, _rows(found, options), strict=True):
        each.bar(("engine", "transformers"), (turn.engine_per_s, turn.peer_per_s), width=0.6)
        each.set_title(f"{name}: {turn.ratio:.2f} times", fontsize=9, loc="left")
        each.set_ylabel("tokens per second")
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
