"""What the desk of an instance rests on, and the steps that its ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.books.scheduler import Scheduler
from baton.engine.commands import Batch, Command, SampledToken, Step, StepDone
from baton.engine.instance.record import Facts
from baton.plan import Layout


@dataclass(frozen=True, slots=True)
class Premises:
    """What the desk of an instance rests on."""

    name: str
    layout: Layout
    schedulers: list[Scheduler]
    facts: Facts
    vocab_size: int
    hidden_size: int
    tell: Callable[[Command], None]


@dataclass(slots=True)
class Flying:
    """A step that ranks compute."""

    step: Step
    batches: list[Batch | None]
    missing: set[int]
    done: dict[int, StepDone] = field(default_factory=dict)


@dataclass(slots=True)
class Yield:
    """What a step gave one dp group: tokens, guesses and rows to fork from by sequence."""

    samples: dict[int, list[SampledToken]] = field(default_factory=dict)
    proposals: dict[int, int] = field(default_factory=dict)
    hidden: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, dones: list[StepDone]) -> Yield:
        """Of all ranks of the group; one of them samples."""
        found = cls()
        for done in dones:
            found.samples |= done.samples
            found.proposals |= done.proposals
            found.hidden |= done.hidden
        return found

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Token ids by sequence."""
        return {number: [each.token for each in found] for number, found in self.samples.items()}
