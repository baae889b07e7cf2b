"""Load-balancing policies, by name: each is a cost, and the candidate with the lowest one is chosen.

Among equal costs the candidate that was chosen longest ago is next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from baton.errors import ConfigError


class Candidate(msgspec.Struct, frozen=True):
    """An instance that could be given a request."""

    name: str
    load_tokens: int
    """In flight there."""
    num_in_flight: int
    num_new_tokens: int
    """Of this request's prompt that it would have to compute, by the prefix index."""


def _round_robin(candidate: Candidate) -> tuple[int, ...]:
    return ()


def _least_loaded(candidate: Candidate) -> tuple[int, ...]:
    return candidate.load_tokens, candidate.num_in_flight


def _prefix_aware(candidate: Candidate) -> tuple[int, ...]:
    # Both are tokens: a popular prefix fills one instance only until computing it elsewhere costs the same.
    return candidate.load_tokens + candidate.num_new_tokens, candidate.num_in_flight


COSTS: dict[str, Callable[[Candidate], tuple[int, ...]]] = {
    "least_loaded": _least_loaded,
    "prefix_aware": _prefix_aware,
    "round_robin": _round_robin,
}


def policy_names() -> tuple[str, ...]:
    return tuple(sorted(COSTS))


class Policy:
    """A policy with a bounded memory of its choices, which survives instances that come and go."""

    def __init__(self, name: str) -> None:
        if name not in COSTS:
            raise ConfigError(f"policy {name!r} is not known; use one of {', '.join(policy_names())}")
        self._cost = COSTS[name]
        self._chosen_at: dict[str, int] = {}
        self._num_chosen = 0

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates, of which there is at least one."""
        chosen = min(
            candidates,
            key=lambda candidate: (self._cost(candidate), self._chosen_at.get(candidate.name, 0)),
        )
        self._num_chosen += 1
        self._chosen_at[chosen.name] = self._num_chosen
        if len(self._chosen_at) > 2 * len(candidates) + 64:
            names = {candidate.name for candidate in candidates}
            self._chosen_at = {name: at for name, at in self._chosen_at.items() if name in names}
        return chosen
