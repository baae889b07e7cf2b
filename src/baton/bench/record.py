"""Timing, and the provenance of results: command, machine and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from baton.errors import ConfigError
from baton.observe import NO_MATPLOTLIB, save_picture


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else "unknown"


def commit() -> str:
    """The commit of the checkout, marked if it has changes; `unknown` outside one."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes results with their provenance, as JSON, and prints where they are."""
    program = sys.argv[0] if sys.argv[0].endswith(".py") and "__main__" not in sys.argv[0] else "baton"
    record = {
        "command": " ".join([program, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out") from None
    print(f"written to {path}")


def show_picture(path: Path, paint: Callable[[Any], Any], dpi: int = 130) -> None:
    """Writes a picture, and prints where it is or why there is none."""
    print(f"drawn in {path}" if save_picture(path, paint, dpi) else NO_MATPLOTLIB)


def seconds(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """The best and the median time of several runs."""
    return side_by_side([work], repeats)[0]


def side_by_side(works: Sequence[Callable[[], object]], repeats: int) -> list[dict[str, float]]:
    """The same for several pieces of work in turns, so that other load falls on all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, taken in zip(works, times, strict=True):
            start = perf_counter()
            work()
            taken.append(perf_counter() - start)
    return [{"best_s": min(taken), "median_s": median(taken)} for taken in times]
