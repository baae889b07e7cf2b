"""Where coordinators are found, as long as it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.sim.host import Host

if TYPE_CHECKING:
    from baton.sim.world import World

ANSWER_S = 0.002


@dataclass(slots=True)
class Registry:
    """Addresses by instance; they stay the same over restarts."""

    world: World
    known: dict[str, tuple[str, Host]] = field(default_factory=dict)
    is_up: bool = True

    def register(self, host: Host) -> None:
        """A coordinator is complete."""
        name = host.process.instance
        self.known[name] = (address_of(name), host)
        self.world.note(host.name, "serving")

    def look_up(self, asker: Host, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Answers after a while."""
        asker.process.later(ANSWER_S, self._answer, asker, instance, then)

    def _answer(self, asker: Host, instance: str, then: Callable[[str | None, str], None]) -> None:
        found = self.known.get(instance)
        if not self.is_up or found is None:
            self.world.network.note_apart(asker.process.instance, instance)
        if not self.is_up:
            asker.enter(then, None, "the registry does not answer")
        elif found is None:
            asker.enter(then, None, f"instance {instance} is not registered")
        else:
            asker.enter(then, found[0], "")


def address_of(instance: str) -> str:
    """Where the coordinator of an instance listens, now and after a restart."""
    return f"{instance}:1"
