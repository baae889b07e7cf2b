"""Where pictures come from: matplotlib, if it is installed, without a screen."""

from __future__ import annotations

import importlib
from types import ModuleType


def load_pyplot() -> ModuleType | None:
    """`matplotlib.pyplot`, drawing into files alone; None without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")
