"""Who owns one element: the inverse of how the planner cuts, for checks that share no code with it.

The planner goes from ranks to boxes. Here one goes from an element's indices to the coordinates that hold
it, by the definitions of the layout string alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.plan.cache import Component
from baton.plan.ownership import Spec
from baton.plan.ranges import to_ids
from baton.plan.schemes import Mirror, Split


def stage_of(spec: Spec, layer: int) -> int:
    """The pp coordinate that holds a layer."""
    num_stages, num_layers = spec.layout.size("pp"), spec.cache.num_layers
    layer = min(layer, num_layers - 1)
    if spec.layout.stage_sizes is not None:
        return int(np.searchsorted(np.cumsum(spec.layout.stage_sizes), layer, side="right"))
    base, extra = divmod(num_layers, num_stages)
    small = (num_stages - extra) * base
    return layer // base if layer < small else num_stages - extra + (layer - small) // (base + 1)


def owners_of_unit(spec: Spec, component: Component, unit: int) -> range:
    """The tp coordinates that hold a unit; what has no units is held by all."""
    num_ranks = spec.layout.size("tp")
    if component.units is None:
        return range(num_ranks)
    num_units = component.units.count
    if num_ranks > num_units:
        return range(unit * num_ranks // num_units, (unit + 1) * num_ranks // num_units)
    base, extra = divmod(num_units, num_ranks)
    large = extra * (base + 1)
    owner = unit // (base + 1) if unit < large else extra + (unit - large) // base
    return range(owner, owner + 1)


@lru_cache(maxsize=256)
def has_tokens(spec: Spec, component: Component, cp: int, num_entries: int) -> NDArray[np.bool_]:
    """Which entries a cp coordinate holds."""
    entries = np.arange(num_entries, dtype=np.int64)
    scheme, num_ranks, page = spec.layout.scheme, spec.layout.size("cp"), spec.storage.page_tokens
    if isinstance(scheme, Mirror) or not component.extent.has_tokens:
        return np.ones(num_entries, dtype=bool)
    if isinstance(scheme, Split):
        num_pages = -(-num_entries // page)
        ends = np.cumsum(
            [num_pages // num_ranks + (rank < num_pages % num_ranks) for rank in range(num_ranks)]
        )
        return np.asarray(np.searchsorted(ends, entries // page, side="right") == cp)
    return np.asarray(entries // (scheme.block or page) % num_ranks == cp)


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one component."""

    layers: frozenset[int]
    units: frozenset[int]
    share: int
    dp: int


class Holdings:
    """What the ranks of one side hold, worked out element by element and kept."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._layers: dict[str, dict[int, frozenset[int]]] = {}
        self._units: dict[str, dict[int, frozenset[int]]] = {}
        self._held: dict[tuple[str, int], Held] = {}
        for component in spec.cache.components:
            stages = ((layer, (stage_of(spec, layer),)) for layer in to_ids(component.layers))
            self._layers[component.name] = _inverted(stages)
            owners = ((unit, owners_of_unit(spec, component, unit)) for unit in range(component.num_units))
            self._units[component.name] = _inverted(owners)

    def of(self, name: str, rank: int) -> Held:
        """What `rank` holds of the component called `name`."""
        if (name, rank) not in self._held:
            self._held[name, rank] = self._work_out(self.spec.cache.by_name[name], rank)
        return self._held[name, rank]

    def _work_out(self, component: Component, rank: int) -> Held:
        at, name = self.spec.layout.coordinates(rank), component.name
        is_shared_out = component.extent.has_tokens and not isinstance(self.spec.layout.scheme, Mirror)
        share = at["cp"] if is_shared_out else 0
        layers = self._layers[name].get(at["pp"], frozenset())
        return Held(layers, self._units[name][at["tp"]], share, at["dp"])


def _inverted(owners: Iterable[tuple[int, Iterable[int]]]) -> dict[int, frozenset[int]]:
    """Members by owner, from owners by member."""
    found: dict[int, set[int]] = {}
    for member, coordinates in owners:
        for coordinate in coordinates:
            found.setdefault(coordinate, set()).add(member)
    return {coordinate: frozenset(members) for coordinate, members in found.items()}
