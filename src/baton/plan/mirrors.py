"""Sharing the load where several source ranks hold the same thing.

Theory. m mirror sources and n targets that want the same are laid over one line of length m * n / gcd^2:
each target covers m' = m / gcd of it, each source n' = n / gcd. Where a source's stretch meets a target's
there is a route. That is at most m' + n' - 1 routes in each of gcd groups, every source has the same
stretch, and where the numbers come out even it is one route per target or one per source.

A route's stretch within its target, [lo, hi) of m', says which turns it takes when the target's pages are
dealt round robin in turns of m'. Pages are counted over the prompt from token 0, so that every chunk of a
prefill uses all sources. What has no tokens is dealt by layers in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from baton.plan.tokens import Stride


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns [lo, hi) of every `period`."""

    lo: int = 0
    hi: int = 1
    period: int = 1

    def stride(self, block: int, offset: int, num_entries: int) -> Stride:
        """The entries dealt to these turns in blocks, the dealing beginning at `offset`."""
        phase = (self.lo - offset) % self.period
        return Stride(0, num_entries, phase * block, (self.hi - self.lo) * block, self.period * block)

    def takes(self, index: int, offset: int) -> bool:
        """Whether the item at `index` falls to these turns."""
        return self.lo <= (index + offset) % self.period < self.hi


@dataclass(frozen=True, slots=True)
class Match:
    """Mirror number `source` serves target number `target` in these turns."""

    source: int
    target: int
    turns: Turns


@lru_cache(maxsize=4096)
def deal(num_sources: int, num_targets: int) -> tuple[Match, ...]:
    """Who serves whom among mirrors; every target's turns are covered exactly once."""
    num_groups = gcd(num_sources, num_targets)
    sources, targets = num_sources // num_groups, num_targets // num_groups
    matches = []
    for target in range(targets):
        start, stop = target * sources, (target + 1) * sources
        for source in range(start // targets, -(-stop // targets)):
            lo, hi = max(start, source * targets), min(stop, (source + 1) * targets)
            matches.append((source, target, Turns(lo - start, hi - start, sources)))
    return tuple(
        Match(group * sources + source, group * targets + target, turns)
        for group in range(num_groups)
        for source, target, turns in matches
    )
