"""Pairs of ranks that bind alike: in a large mesh most pairs differ in nothing but their numbers.

Two pairs bind to the same spans when both ends keep their components at the same places and the routes
between them take the same local layers, units, shares and turns, provided that the page tables are the
same. A preview then binds one pair of each sort and multiplies.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from baton.plan.ownership import Spec, box, placements
from baton.plan.ranges import to_ids
from baton.plan.routes import Plan, Route


@dataclass(frozen=True, slots=True)
class Sort:
    """Pairs of ranks that bind alike, and the plan of the first of them alone."""

    pairs: tuple[tuple[int, int], ...]
    plan: Plan


def sorts_of_pairs(plan: Plan) -> list[Sort]:
    """Every pair of ranks that a plan names, by sort."""
    by_pair: dict[tuple[int, int], list[Route]] = {}
    for route in plan.routes:
        by_pair.setdefault((route.source, route.target), []).append(route)
    sources, targets = _Ranks(plan.source, "source"), _Ranks(plan.target, "target")
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for pair, routes in by_pair.items():
        parts = tuple(
            (route.source_share, route.target_share, route.turns, sources.local(route), targets.local(route))
            for route in routes
        )
        key = (sources.places(pair[0]), targets.places(pair[1]), parts)
        found.setdefault(key, []).append(pair)
    return [Sort(tuple(pairs), replace(plan, routes=tuple(by_pair[pairs[0]]))) for pairs in found.values()]


class _Ranks:
    """One side's ranks, seen from inside: what is where, without the rank's number."""

    def __init__(self, spec: Spec, side: str) -> None:
        self.spec, self.side = spec, side
        self._places: dict[int, Hashable] = {}
        self._local: dict[tuple[int, str, Hashable, Hashable], Hashable] = {}

    def places(self, rank: int) -> Hashable:
        """Where every component lies."""
        if rank not in self._places:
            found = placements(self.spec, rank, self.side)
            self._places[rank] = tuple(
                (name, at.buffer, at.offset, tuple(at.strides.items())) for name, at in sorted(found.items())
            )
        return self._places[rank]

    def local(self, route: Route) -> Hashable:
        """A route's component, layers and units as the rank counts them."""
        rank = route.source if self.side == "source" else route.target
        key = (rank, route.component, route.layers, route.units)
        if key not in self._local:
            held = box(self.spec, self.spec.cache.by_name[route.component], rank, self.side)
            first = {layer: i for i, layer in enumerate(to_ids(held.layers))}
            layers = tuple(first[layer] for layer in to_ids(route.layers))
            self._local[key] = (
                route.component,
                layers,
                route.units[0] - held.units[0],
                route.units[1] - route.units[0],
            )
        return self._local[key]
