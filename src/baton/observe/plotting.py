"""matplotlib, if it is installed."""

from __future__ import annotations

import importlib
from types import ModuleType

NO_MATPLOTLIB = "no picture: matplotlib is not installed (pip install matplotlib)"


def load_pyplot() -> ModuleType | None:
    """`matplotlib.pyplot` for writing files, without a display; None if it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")
