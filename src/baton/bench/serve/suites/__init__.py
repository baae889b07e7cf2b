"""Sets of runs that answer one question each; one module a suite, found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ConfigError

SUITES = ("interference", "router", "seed004")
Progress = Callable[[int | None, int, str], None]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What a user may say to any suite; empty or 0: what the suite is made for."""

    model: str = ""
    link: str = ""
    repeats: int = 0
    seed: int = 0


class Suite(Protocol):
    """What a module of this folder has."""

    def measure(self, options: SuiteOptions, progress: Progress) -> Any:
        """Runs everything."""

    def show(self, found: Any, path: Path, picture: Path | None) -> None:
        """Prints tables and writes the record."""

    def is_right(self, found: Any) -> bool:
        """Whether every request was answered; a missed target is a figure, not a failure."""


def find_suite(name: str) -> Suite:
    """The suite of this name."""
    if name not in SUITES:
        raise ConfigError(f"suite {name!r} is not known; use {', '.join(SUITES)}")
    found: Any = importlib.import_module(f"baton.bench.serve.suites.{name}")
    return found  # type: ignore[no-any-return]
