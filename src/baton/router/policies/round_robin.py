"""In turn: whoever was chosen longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.candidates import Candidate, Policy, Turns


class RoundRobin:
    """Takes no notice of load."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one that has waited for the longest."""
        return self._turns.take(min(candidates, key=lambda each: self._turns.since(each.name)), candidates)


def make() -> Policy:
    """The policy."""
    return RoundRobin()
