"""Whoever would have the prompt soonest: by what it has to do, and what it has to compute of this one.

Both are in tokens, so a cached prefix is worth as much as the same number of tokens of other people's work:
a popular prefix fills one instance only until the others, who would have to compute it, are as good.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.candidates import Candidate, Policy, Turns


class PrefixAware:
    """Weighs a cached prefix against load."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one with the least to do, this prompt included."""
        return self._turns.take(min(candidates, key=self._cost), candidates)

    def _cost(self, candidate: Candidate) -> tuple[int, int, int]:
        tokens = candidate.load_tokens + candidate.num_new_tokens
        return tokens, candidate.num_in_flight, self._turns.since(candidate.name)


def make() -> Policy:
    """The policy."""
    return PrefixAware()
