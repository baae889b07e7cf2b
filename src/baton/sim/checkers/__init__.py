"""What must hold in every seed: one small class each, found by the name of its module.

A module has `CHECKER`, a subclass of `Checker`. A method of one of these names is called when that happens:

    submitted(flight, pool, buffer)   a batch was queued
    landing(write)                    a piece is about to be written
    flight_ended(flight, how)         a batch came to its completion
    changed(job, rank, outcome)       a rank's engine heard how a transfer ended
    decoded(job, rank)                a rank's engine has used the cache
    died(incarnation)                 a process of an instance is gone
    sent(end, message)                a message left by a session link
    received(end, message)            a message came by a session link
    told(host, message)               a message left by a member link
    over()                            everything is settled
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from baton.sim.checkers.base import Checker
from baton.sim.violation import Violation

if TYPE_CHECKING:
    from baton.sim.world import World

SHARED = frozenset({"base"})


@cache
def checker_names() -> tuple[str, ...]:
    """Every checker there is."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED))


class Checkers:
    """All checkers of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_over = False
        self.found: Violation | None = None
        modules = [importlib.import_module(f"{__name__}.{name}") for name in checker_names()]
        self.all: dict[str, Checker] = {
            name: module.CHECKER(world, name) for name, module in zip(checker_names(), modules, strict=True)
        }
        self._hooks: dict[str, list[Callable[..., None]]] = {}

    def tell(self, event: str, *args: Any) -> None:
        """Something happened; a violation that a driver's own safety net catches is not forgotten."""
        try:
            for hook in self._hooks_of(event):
                hook(*args)
        except Violation as found:
            self.found = self.found or found
            raise

    def listen(self, event: str, hook: Callable[..., None]) -> None:
        """Has somebody else told too."""
        self._hooks_of(event).append(hook)

    def _hooks_of(self, event: str) -> list[Callable[..., None]]:
        hooks = self._hooks.get(event)
        if hooks is None:
            found = (getattr(checker, event, None) for checker in self.all.values())
            hooks = self._hooks[event] = [hook for hook in found if hook is not None]
        return hooks

    def finish(self) -> None:
        """Everything is settled."""
        self.tell("over")
        self.is_over = True

    def fail(self, checker: str, text: str) -> None:
        """Something is wrong that no single event shows."""
        raise Violation(self.world.seed, checker, text)
