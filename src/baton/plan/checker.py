"""A finished plan checked from the two specs alone, however it was built.

`check` takes the routes of one prompt and asks of every target rank: is each element that it owns and does
not hold sent exactly once, by a rank that owns it, and nothing else? (`baton.plan.proof` asks the same of
the rules, for prompts of any length.)

Layers and units are few, so they are compared cell by cell, a cell being a block of layers and units that
no route divides. Token sets are many tokens but few distinct ones, so each combination is counted once with
numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import PlanError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.elements import Held, Holdings, has_tokens
from baton.plan.ownership import Spec
from baton.plan.prompt import BoundRoute, Prompt
from baton.plan.ranges import to_ids
from baton.plan.routes import Plan
from baton.plan.tokens import TokenSet


@dataclass(frozen=True, slots=True)
class _Claim:
    """A route seen from its target: a box of layers and units, and some tokens."""

    layers: frozenset[int]
    units: frozenset[int]
    tokens: TokenSet


class _Tokens:
    """Token sets of one prompt as masks, each spelt out once."""

    def __init__(self, plan: Plan, prompt: Prompt) -> None:
        self.plan, self.prompt = plan, prompt
        granule = plan.source.storage.granule
        self.num_entries = -(-prompt.num_tokens // granule) * granule
        self._masks: dict[TokenSet, NDArray[np.bool_]] = {}
        self._verdicts: dict[tuple[str, int, tuple[TokenSet, ...]], bool] = {}

    def entries(self, component: Component) -> int:
        return self.num_entries if component.extent.has_tokens else 1

    def mask(self, tokens: TokenSet) -> NDArray[np.bool_]:
        """The members of a token set; raises PlanError where the set breaks its own rules."""
        if tokens not in self._masks:
            self._masks[tokens] = _spell(tokens, self.num_entries)
        return self._masks[tokens]

    def owned(self, spec: Spec, component: Component, rank: int) -> NDArray[np.bool_]:
        cp = spec.layout.coordinates(rank)["cp"]
        return has_tokens(spec, component, cp, self.entries(component))

    def needed(self, component: Component, rank: int) -> NDArray[np.bool_]:
        """What a target rank owns and does not hold."""
        mine = self.owned(self.plan.target, component, rank)
        if not component.extent.has_tokens:
            return mine
        first = self.prompt.held.get(component.group, 0)
        if component.extent.window is not None:
            first = max(first, self.prompt.num_tokens - component.extent.window)
        granule = self.plan.source.storage.granule
        return np.asarray(mine & (np.arange(self.num_entries) >= first // granule * granule))

    def is_exact_cover(self, component: Component, rank: int, sets: tuple[TokenSet, ...]) -> bool:
        """Whether the sets together hold each needed token once and no other."""
        cp = self.plan.target.layout.coordinates(rank)["cp"]
        key = (component.name, cp, sets)
        if key not in self._verdicts:
            counts = np.zeros(self.entries(component), dtype=np.int64)
            for tokens in sets:
                counts += self.mask(tokens)[: len(counts)]
            self._verdicts[key] = bool((counts == self.needed(component, rank)).all())
        return self._verdicts[key]


def _spell(tokens: TokenSet, num_entries: int) -> NDArray[np.bool_]:
    mask = np.zeros(num_entries, dtype=bool)
    entries = np.arange(num_entries, dtype=np.int64)
    if not tokens or list(tokens) != sorted(tokens):
        raise PlanError(f"token set {tokens} is empty or not sorted")
    for item in tokens:
        start, stop = item[0], item[1]
        block, period = (item[2], item[3]) if len(item) == 4 else (1, 1)
        if not (0 <= start < stop <= num_entries and 1 <= block <= period):
            raise PlanError(f"token set item {item} is out of bounds (0 to {num_entries})")
        members = (entries >= start) & (entries < stop) & ((entries - start) % period < block)
        if (mask & members).any():
            raise PlanError(f"token set {tokens} names a token twice")
        mask |= members
    return mask


def check(plan: Plan, prompt: Prompt, routes: Iterable[BoundRoute]) -> None:
    """Raises PlanError unless every target rank is sent what it owns and lacks, once, by an owner."""
    tokens, sources, targets = _Tokens(plan, prompt), Holdings(plan.source), Holdings(plan.target)
    claims: dict[tuple[int, str], list[_Claim]] = {}
    for route in routes:
        claim = _checked_claim(plan, route, tokens, sources)
        claims.setdefault((route.target, route.component), []).append(claim)
    for rank in plan.target.layout.group(plan.target_dp):
        for component in plan.target.cache.components:
            found = claims.get((rank, component.name), [])
            _check_cover(component, rank, targets.of(component.name, rank), found, tokens)


def _checked_claim(plan: Plan, route: BoundRoute, tokens: _Tokens, sources: Holdings) -> _Claim:
    """The route as a claim on its target, after its own fields and its source's ownership are checked."""
    component = plan.target.cache.by_name.get(route.component)
    if component is None:
        raise _fault(route, f"the target has no component {route.component}")
    _check_group(route, plan)
    units = frozenset(range(*route.units)) if route.units is not None else frozenset({0})
    if (route.units is None) != (component.units is None):
        raise _fault(route, "units are given where there are none, or the other way round")
    if (route.tokens is None) == component.extent.has_tokens:
        raise _fault(route, "tokens are given where there are none, or the other way round")
    claim = _Claim(frozenset(to_ids(route.layers)), units, route.tokens or ((0, 1),))
    mask = tokens.mask(claim.tokens)[: tokens.entries(component)]
    giver = plan.source.cache.by_name[component.name]
    held = sources.of(component.name, route.source)
    if not claim.layers <= held.layers:
        raise _fault(route, f"the source does not hold layers {sorted(claim.layers)}")
    if not units <= held.units:
        raise _fault(route, f"the source does not hold units {sorted(units)}")
    if (mask & ~tokens.owned(plan.source, giver, route.source)).any():
        raise _fault(route, "the source does not hold all of its tokens")
    per_unit = component.num_elements * item_bytes(plan.source.storage.dtype_of(giver))
    if route.num_bytes != len(claim.layers) * len(units) * int(mask.sum()) * per_unit:
        raise _fault(route, f"{route.num_bytes} bytes do not follow from its layers, units and tokens")
    return claim


def _check_group(route: BoundRoute, plan: Plan) -> None:
    for spec, dp, rank in (
        (plan.source, plan.source_dp, route.source),
        (plan.target, plan.target_dp, route.target),
    ):
        if not 0 <= rank < spec.layout.num_ranks or spec.layout.coordinates(rank)["dp"] != dp:
            raise _fault(route, f"rank {rank} is not in dp group {dp} of {spec.layout}")


def _fault(route: BoundRoute, reason: str) -> PlanError:
    return PlanError(f"route {route.component} from rank {route.source} to rank {route.target}: {reason}")


def _check_cover(
    component: Component, rank: int, held: Held, claims: Sequence[_Claim], tokens: _Tokens
) -> None:
    """Every cell of the target's box is claimed for the tokens that it lacks, and nothing else is."""
    where = f"component {component.name}, target rank {rank}"
    for claim in claims:
        if not claim.layers <= held.layers or not claim.units <= held.units:
            raise PlanError(f"{where}: is sent layers or units that it does not own")
    needs_any = bool(tokens.needed(component, rank).any())
    for cell_layers in _classes(held.layers, [claim.layers for claim in claims]):
        for cell_units in _classes(held.units, [claim.units for claim in claims]):
            layer, unit = cell_layers[0], cell_units[0]
            sets = tuple(sorted(c.tokens for c in claims if layer in c.layers and unit in c.units))
            if (sets or needs_any) and not tokens.is_exact_cover(component, rank, sets):
                raise PlanError(
                    f"{where}: layers {cell_layers}, units {cell_units}: not sent exactly once: {sets}"
                )


def _classes(members: frozenset[int], sets: Sequence[frozenset[int]]) -> list[list[int]]:
    """`members` grouped by which of `sets` they belong to."""
    found: dict[tuple[bool, ...], list[int]] = {}
    distinct = list(dict.fromkeys(sets))
    for member in sorted(members):
        found.setdefault(tuple(member in part for part in distinct), []).append(member)
    return list(found.values())
