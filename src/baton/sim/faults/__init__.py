"""What can go wrong: one module per fault, found by its name.

A module has `Config`, a frozen dataclass that says how strong the fault is, `draw(chance)`, a random one, and
`install(world, config)`, which begins it. A fault stops by itself when `world.are_faults_over()`.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from functools import cache
from types import ModuleType
from typing import Any

NONE_SHARE = 0.12
"""Of all seeds, those in which nothing goes wrong: everything has to succeed there."""


@cache
def fault_names() -> tuple[str, ...]:
    """Every fault there is."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__)))


def fault(name: str) -> ModuleType:
    """The module of a fault."""
    return importlib.import_module(f"{__name__}.{name}")


def draw_faults(chance: random.Random) -> dict[str, Any]:
    """A random choice of faults, each at random strength."""
    draws = {name: (chance.random(), chance.getrandbits(64)) for name in fault_names()}
    if chance.random() < NONE_SHARE:
        return {}
    share = chance.choice((0.08, 0.2, 0.4))
    return {
        name: fault(name).draw(random.Random(seed)) for name, (roll, seed) in draws.items() if roll < share
    }
