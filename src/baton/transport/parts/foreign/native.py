"""Foreign libraries imported, with the system libraries that they need and the system lacks.

`tools/native.sh` unpacks those beside the virtual environment. They are loaded by path before the import, and
for nobody else's use: a program may hold another copy of the same library for another purpose.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from types import ModuleType

from baton.errors import ConfigError

REMEDY = "run tools/native.sh"


def import_native(names: tuple[str, ...]) -> ModuleType:
    """The first of these modules that can be imported."""
    causes = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            causes.append(f"{name} is not installed")
        except ImportError as cause:
            if _load_unpacked(Path(sys.prefix) / "native"):
                return import_native((name,))
            causes.append(f"{name}: {cause}")
    raise ConfigError(f"{', '.join(causes)}; {REMEDY}")


_loaded: dict[Path, ctypes.CDLL] = {}


def _load_unpacked(folder: Path) -> bool:
    """Loads what lies there, each after what it needs; whether anything was new."""
    waiting = [path for path in sorted(folder.glob("**/lib*.so.*")) if path not in _loaded]
    num_before = len(_loaded)
    while waiting:
        left = [path for path in waiting if not _load(path)]
        if len(left) == len(waiting):
            break
        waiting = left
    return len(_loaded) > num_before


def _load(path: Path) -> bool:
    try:
        _loaded[path] = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True
