"""Named stories with a known end: the first things that went wrong elsewhere.

A module has `SCENARIOS`, a tuple of `Scenario`; they are found by name over all modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from baton.errors import ConfigError
from baton.sim.scenarios.play import Play, Scenario
from baton.sim.violation import Violation
from baton.sim.world import World

SHARED = frozenset({"play"})


@cache
def _all() -> dict[str, Scenario]:
    modules = sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED)
    return {
        found.name: found
        for name in modules
        for found in importlib.import_module(f"{__name__}.{name}").SCENARIOS
    }


def scenario_names() -> tuple[str, ...]:
    """Every scenario there is."""
    return tuple(_all())


def scenario(name: str) -> Scenario:
    """The scenario of this name."""
    if name not in _all():
        raise ConfigError(f"there is no scenario {name!r}; baton sim --list names them")
    return _all()[name]


def play(story: Scenario, seed: int = 0, *, is_traced: bool = False) -> tuple[World, Violation | None]:
    """Plays a scenario; the seed moves its timing, not its end."""
    stage = Play(story, seed, is_traced=is_traced)
    return stage.world, stage.run()
