"""Pictures with matplotlib, if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

NO_MATPLOTLIB = "no picture: matplotlib is not installed (pip install matplotlib)"


def load_pyplot() -> ModuleType | None:
    """`matplotlib.pyplot` for writing files, without a display; None if it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save_picture(path: Path, paint: Callable[[Any], Any], dpi: int = 130) -> bool:
    """Writes the figure that `paint` makes with pyplot; False, and nothing written, without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure = paint(pyplot)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
    return True
