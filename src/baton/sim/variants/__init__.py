"""Deliberate defects: each is put into the production code for a while, and the simulator has to notice.

A module has `VARIANT`, a `Variant`; they are found by module name.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

from baton.errors import ConfigError
from baton.sim.runner import make_world, options_of, run_world
from baton.sim.scenarios import scenario
from baton.sim.scenarios.play import Play
from baton.sim.variants.variant import Variant
from baton.sim.violation import Violation
from baton.sim.world import World

SHARED = frozenset({"patching", "variant"})


@cache
def variant_names() -> tuple[str, ...]:
    """Every defect there is."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED))


def variant(name: str) -> Variant:
    """The defect of this name."""
    if name not in variant_names():
        raise ConfigError(f"there is no defect {name!r}; baton sim --list names them")
    found: Variant = importlib.import_module(f"{__name__}.{name}").VARIANT
    return found


@dataclass(frozen=True, slots=True)
class Caught:
    """A defect that was noticed: in which seed, after how many, and by whom."""

    violation: Violation
    num_tries: int
    world: World


def catch(name: str, *, is_traced: bool = False) -> Caught | None:
    """Runs seeds with a defect until a checker that should notice it does."""
    found = variant(name)
    for number in range(1, found.num_tries + 1):
        with found.broken():
            world, violation = _run(found, number, is_traced)
        if violation is not None and violation.checker in found.checkers:
            return Caught(violation, number, world)
    return None


def _run(found: Variant, seed: int, is_traced: bool) -> tuple[World, Violation | None]:
    if found.scenario:
        play = Play(scenario(found.scenario), seed, is_traced=is_traced)
        return play.world, play.run()
    world = make_world(seed, options_of(seed, **found.options), is_traced=is_traced)
    return world, run_world(world)
