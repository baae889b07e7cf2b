"""Named scenarios with a known end: transfers that failed in other systems, or in a seed of this one."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.sim.core import Violation
from baton.sim.scenarios import failures, messages, preemption, requests
from baton.sim.scenarios.run import SCENARIOS, ScenarioRun
from baton.sim.world import World

__all__ = ["SCENARIOS", "failures", "messages", "preemption", "requests", "run_scenario"]


def run_scenario(name: str, seed: int = 0, *, is_traced: bool = False) -> tuple[World, Violation | None]:
    """Runs a scenario; the seed moves its timing, not its end."""
    if name not in SCENARIOS:
        raise ConfigError(f"there is no scenario {name!r}; baton sim --list names them")
    run = ScenarioRun(SCENARIOS[name], seed, is_traced=is_traced)
    return run.world, run.run()
