"""What a policy chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """An instance that could be given a request."""

    name: str
    load_tokens: int
    """In flight there."""
    num_in_flight: int
    num_new_tokens: int
    """Of this request's prompt that it would have to compute, by the prefix index."""


class Policy(Protocol):
    """Chooses; what it remembers of its choices is its own business and has to be bounded."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates, of which there is at least one."""


class Turns:
    """Who was chosen longest ago; the order survives instances that come and go."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._num_taken = 0

    def since(self, name: str) -> int:
        """Lower for those that were chosen longer ago."""
        return self._last.get(name, 0)

    def take(self, chosen: Candidate, candidates: Sequence[Candidate]) -> Candidate:
        """Notes the choice, and forgets who is no candidate any more once those are many."""
        self._num_taken += 1
        self._last[chosen.name] = self._num_taken
        if len(self._last) > 2 * len(candidates) + 64:
            names = {candidate.name for candidate in candidates}
            self._last = {name: turn for name, turn in self._last.items() if name in names}
        return chosen
