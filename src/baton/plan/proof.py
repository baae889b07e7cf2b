"""That a plan's rules cover every prompt, whatever its length: done once per pair, before any traffic.

Along the tokens a target share T is covered, for any length, when (1) every source share that can have a
token in common with T is there, since the shares of one side partition the tokens, and (2) within each
source share the turns of its routes tile the dealing period without gap or overlap. Along layers and units
a target's box is cut into cells that no route divides, and each cell must satisfy (1) and (2). What has no
tokens is dealt by layers, so there (2) speaks of routes over the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import PlanError
from baton.plan.elements import Held, Holdings
from baton.plan.mirrors import Turns
from baton.plan.ownership import END, scheme, share_stride
from baton.plan.ranges import Range, Ranges, to_ids
from baton.plan.routes import Plan, Route
from baton.plan.tokens import can_meet


@dataclass(frozen=True, slots=True)
class _Claim:
    """A route without its ends: targets that are sent the same need one proof."""

    layers: Ranges
    units: Range
    source_share: int
    turns: Turns


def prove(plan: Plan) -> None:
    """Raises PlanError unless every prompt would be covered exactly once, by owners."""
    sources, targets = Holdings(plan.source), Holdings(plan.target)
    by_target: dict[tuple[int, str], list[_Claim]] = {}
    for route in plan.routes:
        _prove_ends(
            plan, route, sources.of(route.component, route.source), targets.of(route.component, route.target)
        )
        claim = _Claim(route.layers, route.units, route.source_share, route.turns)
        by_target.setdefault((route.target, route.component), []).append(claim)
    proven: set[tuple[str, Held, tuple[_Claim, ...]]] = set()
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


def _prove_cover(plan: Plan, case: tuple[str, Held, tuple[_Claim, ...]], where: str) -> None:
    name, held, claims = case
    cells: dict[tuple[int, int], list[_Claim]] = {
        (layer, unit): [] for layer in held.layers for unit in held.units
    }
    for claim in claims:
        for layer in to_ids(claim.layers):
            for unit in range(*claim.units):
                cells[layer, unit].append(claim)
    needed = _meeting_shares(plan, name, held.share)
    for distinct in {tuple(found): None for found in cells.values()}:
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


def _prove_cell(claims: Sequence[_Claim], needed: frozenset[int], where: str) -> None:
    by_share: dict[int, list[_Claim]] = {}
    for claim in claims:
        by_share.setdefault(claim.source_share, []).append(claim)
    if set(by_share) != needed:
        raise PlanError(f"{where}: source shares {sorted(by_share)} arrive, {sorted(needed)} are needed")
    for found in by_share.values():
        turns = sorted((claim.turns.lo, claim.turns.hi) for claim in found)
        starts, stops = [lo for lo, _ in turns], [hi for _, hi in turns]
        is_alike = len({(claim.turns.period, claim.layers) for claim in found}) == 1
        if not is_alike or starts != [0, *stops[:-1]] or stops[-1] != found[0].turns.period:
            raise PlanError(f"{where}: turns {turns} of {found[0].turns.period} leave a gap or overlap")
