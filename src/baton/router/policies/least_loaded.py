"""Whoever has the fewest tokens in flight; among equals the fewest requests, then in turn."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.candidates import Candidate, Policy, Turns


class LeastLoaded:
    """Looks at load alone."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one with the least to do."""
        return self._turns.take(min(candidates, key=self._cost), candidates)

    def _cost(self, candidate: Candidate) -> tuple[int, int, int]:
        return candidate.load_tokens, candidate.num_in_flight, self._turns.since(candidate.name)


def make() -> Policy:
    """The policy."""
    return LeastLoaded()
