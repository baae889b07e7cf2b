"""Checks a plan with code that shares nothing with the planner.

The planner goes from ranks to boxes. The checker goes from an element's indices to the coordinates that hold
it, by the definitions of the layout string alone (`stage_of`, `owners_of_unit`, `has_tokens`, `Holdings`).

`check` takes the routes of one prompt and asks of every target rank: is each element that it owns and does
not hold sent exactly once, by a rank that owns it, and nothing else? Layers and units are few, so they are
compared cell by cell, a cell being a block of layers and units that no route divides. Token sets are many
tokens but few distinct ones, so each combination is counted once with numpy.

`prove` asks the same of the rules, for prompts of any length, once per pair before any traffic. Along the
tokens a target share T is covered, for any length, when (1) every source share that can have a token in
common with T is there, since the shares of one side partition the tokens, and (2) within each source share
the turns of its routes tile the dealing period without gap or overlap. Along layers and units a target's box
is cut into cells that no route divides, and each cell must satisfy (1) and (2). What has no tokens is dealt
by layers, so there (2) concerns routes over the same layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.errors import PlanError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.layout import Mirror, Split
from baton.plan.ownership import END, Spec, scheme, share_stride
from baton.plan.ranges import Range, Ranges, to_ids
from baton.plan.routes import BoundRoute, Plan, Prompt, RoundRobin, Route
from baton.plan.tokens import TokenSet, can_meet


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
    dealing, num_ranks, page = spec.layout.scheme, spec.layout.size("cp"), spec.storage.page_tokens
    if isinstance(dealing, Mirror) or not component.extent.has_tokens:
        return np.ones(num_entries, dtype=bool)
    if isinstance(dealing, Split):
        num_pages = -(-num_entries // page)
        ends = np.cumsum(
            [num_pages // num_ranks + (rank < num_pages % num_ranks) for rank in range(num_ranks)]
        )
        return np.asarray(np.searchsorted(ends, entries // page, side="right") == cp)
    return np.asarray(entries // (dealing.block or page) % num_ranks == cp)


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
    members_of: dict[int, set[int]] = {}
    for member, coordinates in owners:
        for coordinate in coordinates:
            members_of.setdefault(coordinate, set()).add(member)
    return {coordinate: frozenset(members) for coordinate, members in members_of.items()}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A route without its ends: targets that are sent the same need one proof."""

    layers: Ranges
    units: Range
    source_share: int
    turns: RoundRobin


def prove(plan: Plan) -> None:
    """Raises PlanError unless every prompt would be covered exactly once, by owners."""
    sources, targets = Holdings(plan.source), Holdings(plan.target)
    by_target: dict[tuple[int, str], list[_Rule]] = {}
    for route in plan.routes:
        _prove_ends(
            plan, route, sources.of(route.component, route.source), targets.of(route.component, route.target)
        )
        claim = _Rule(route.layers, route.units, route.source_share, route.turns)
        by_target.setdefault((route.target, route.component), []).append(claim)
    proven: set[tuple[str, Held, tuple[_Rule, ...]]] = set()
    for rank in plan.target.layout.group(plan.target_dp):
        for component in plan.target.cache.components:
            claims = tuple(by_target.get((rank, component.name), []))
            case = (component.name, targets.of(component.name, rank), claims)
            if case not in proven:
                _prove_cover(plan, case, f"component {component.name}, target rank {rank}")
                proven.add(case)


def _prove_ends(plan: Plan, route: Route, giver: Held, taker: Held) -> None:
    layers, units = to_ids(route.layers), range(*route.units)
    for side, held, dp, share in (
        ("source", giver, plan.source_dp, route.source_share),
        ("target", taker, plan.target_dp, route.target_share),
    ):
        is_owner = (held.dp, held.share) == (dp, share)
        if not (is_owner and held.layers.issuperset(layers) and held.units.issuperset(units)):
            rank = route.source if side == "source" else route.target
            raise PlanError(
                f"component {route.component}: {side} rank {rank} does not own what a route carries"
            )


def _prove_cover(plan: Plan, case: tuple[str, Held, tuple[_Rule, ...]], where: str) -> None:
    name, held, claims = case
    cells: dict[tuple[int, int], list[_Rule]] = {
        (layer, unit): [] for layer in held.layers for unit in held.units
    }
    for claim in claims:
        for layer in to_ids(claim.layers):
            for unit in range(*claim.units):
                cells[layer, unit].append(claim)
    needed = _meeting_shares(plan, name, held.share)
    for distinct in {tuple(covering): None for covering in cells.values()}:
        _prove_cell(distinct, needed, where)


def _meeting_shares(plan: Plan, name: str, share: int) -> frozenset[int]:
    """The source shares that can have a token in common with a target share."""
    component = plan.target.cache.by_name[name]
    mine = share_stride(plan.target, component, share, END)
    num_shares = scheme(plan.source, component).num_shares(plan.source.layout.size("cp"))
    return frozenset(
        other
        for other in range(num_shares)
        if can_meet(share_stride(plan.source, component, other, END), mine)
    )


def _prove_cell(claims: Sequence[_Rule], needed: frozenset[int], where: str) -> None:
    by_share: dict[int, list[_Rule]] = {}
    for claim in claims:
        by_share.setdefault(claim.source_share, []).append(claim)
    if set(by_share) != needed:
        raise PlanError(f"{where}: source shares {sorted(by_share)} arrive, {sorted(needed)} are needed")
    for rules in by_share.values():
        turns = sorted((claim.turns.lo, claim.turns.hi) for claim in rules)
        starts, stops = [lo for lo, _ in turns], [hi for _, hi in turns]
        is_alike = len({(claim.turns.period, claim.layers) for claim in rules}) == 1
        if not is_alike or starts != [0, *stops[:-1]] or stops[-1] != rules[0].turns.period:
            raise PlanError(f"{where}: turns {turns} of {rules[0].turns.period} leave a gap or overlap")


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
        """The members of a token set; raises PlanError if the set is not well formed."""
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
            sent = claims.get((rank, component.name), [])
            _check_cover(component, rank, targets.of(component.name, rank), sent, tokens)


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
    classes: dict[tuple[bool, ...], list[int]] = {}
    distinct = list(dict.fromkeys(sets))
    for member in sorted(members):
        classes.setdefault(tuple(member in part for part in distinct), []).append(member)
    return list(classes.values())
