"""The routes of a hand-over: boxes of one side intersected with boxes of the other.

For each component the layers, units and tokens that a source piece and a target piece have in common are
found dim by dim. A combination that is not empty is a box that some mirrors hold and some targets want;
`deal` distributes it over the mirrors. Nothing here knows a model, a kind or a ratio of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias, TypeVar

from baton.errors import LayoutError
from baton.plan.cache import Component
from baton.plan.checker import prove
from baton.plan.ownership import END, Spec, box, by_layer, cuts, layer_names, placements, share_stride
from baton.plan.ranges import Range, Ranges, intersection, overlap, text
from baton.plan.routes import Plan, Route, deal
from baton.plan.tokens import can_meet

Piece = TypeVar("Piece", bound=Hashable)
_Pieces: TypeAlias = list[tuple[Piece, tuple[int, ...]]]

BOXES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The overlap of two pieces along one dim, and the coordinates that hold each."""

    layers: Ranges = ()
    units: Range = (0, 1)
    shares: tuple[int, int] = (0, 0)
    givers: tuple[int, ...] = ()
    takers: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def plan(source: Spec, target: Spec, source_dp: int = 0, target_dp: int = 0) -> Plan:
    """The routes for a pair of specs, proven for prompts of any length; LayoutError where there are none."""
    for side, spec, dp in (("source", source, source_dp), ("target", target, target_dp)):
        if not 0 <= dp < spec.layout.size("dp"):
            raise LayoutError(
                f"dp group {dp} does not exist; groups are 0 to {spec.layout.size('dp') - 1}",
                sides=f"{side} {spec.layout}",
            )
    lacking = [part for part in target.cache.components if part.name not in source.cache.by_name]
    if _layer_names(lacking) & _layer_names(source.cache.components):
        # One side has a component for each layer, because it allocates each by itself.
        source, target = by_layer(source, "source"), by_layer(target, "target")
    routes: list[Route] = []
    for component in target.cache.components:
        check_component(source, target, component)
        routes.extend(_component_routes(source, target, (source_dp, target_dp), component))
    check_granules(
        source, target, [(route.source, route.target, route.component, route.units) for route in routes]
    )
    result = Plan(source, target, source_dp, target_dp, tuple(routes))
    prove(result)
    return result


def _layer_names(components: Iterable[Component]) -> set[str]:
    return {name for component in components for name in layer_names(component).values()}


def _component_routes(
    source: Spec, target: Spec, groups: tuple[int, int], component: Component
) -> Iterator[Route]:
    given = cuts(source, source.cache.by_name[component.name], "source")
    wanted = cuts(target, component, "target")
    layers = [
        _Meeting(layers=common, givers=givers, takers=takers)
        for (mine, givers), (theirs, takers) in _overlapping(
            _pieces(given.layers), _pieces(wanted.layers), _bounds
        )
        if (common := intersection(mine, theirs))
    ]
    units = [
        _Meeting(units=shared, givers=givers, takers=takers)
        for (mine, givers), (theirs, takers) in _overlapping(
            _pieces(given.units), _pieces(wanted.units), _itself
        )
        if (shared := overlap(mine, theirs))
    ]
    tokens = _share_meetings(source, target, component, (given.shares, wanted.shares))
    _check_size(source, target, component, len(layers) * len(units) * len(tokens))
    for stage, block, share in product(layers, units, tokens):
        givers = _ranks(source, groups[0], (stage.givers, share.givers, block.givers))
        takers = _ranks(target, groups[1], (stage.takers, share.takers, block.takers))
        for match in deal(len(givers), len(takers)):
            ends = (givers[match.source], takers[match.target])
            yield Route(*ends, component.name, stage.layers, block.units, *share.shares, match.turns)


def _share_meetings(
    source: Spec, target: Spec, component: Component, shares: tuple[Sequence[int], Sequence[int]]
) -> list[_Meeting]:
    """Shares of tokens that can have one in common."""
    mine, theirs = _pieces(shares[0]), _pieces(shares[1])
    _check_size(source, target, component, len(mine) * len(theirs))
    given = [share_stride(source, component, share, END) for share, _ in mine]
    wanted = [share_stride(target, component, share, END) for share, _ in theirs]
    return [
        _Meeting(shares=(mine[i][0], theirs[j][0]), givers=mine[i][1], takers=theirs[j][1])
        for i, left in enumerate(given)
        for j, right in enumerate(wanted)
        if can_meet(left, right)
    ]


def _check_size(source: Spec, target: Spec, component: Component, num_boxes: int) -> None:
    if num_boxes > BOXES_MAX:
        raise LayoutError(
            f"{num_boxes} boxes to hand over, at most {BOXES_MAX} are planned; use fewer ranks",
            component=component.name,
            sides=f"source {source.layout} and target {target.layout}",
        )


def _itself(units: Range) -> Range:
    return units


def _bounds(layers: Ranges) -> Range:
    return (layers[0][0], layers[-1][1])


def _overlapping(
    mine: _Pieces[Piece], theirs: _Pieces[Piece], bounds: Callable[[Piece], Range]
) -> Iterator[tuple[tuple[Piece, tuple[int, ...]], tuple[Piece, tuple[int, ...]]]]:
    """Pairs of pieces whose bounds overlap; the pieces of a side ascend and are disjoint."""
    left, right = [piece for piece in mine if piece[0]], [piece for piece in theirs if piece[0]]
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = bounds(left[i][0]), bounds(right[j][0])
        if overlap(a, b):
            yield left[i], right[j]
        if a[1] <= b[1]:
            i += 1
        else:
            j += 1


def _pieces(cut: Sequence[Piece]) -> _Pieces[Piece]:
    """The distinct pieces of a cut with the coordinates that hold each."""
    holders: dict[Piece, list[int]] = {}
    for coordinate, piece in enumerate(cut):
        holders.setdefault(piece, []).append(coordinate)
    return [(piece, tuple(coordinates)) for piece, coordinates in holders.items()]


def _ranks(spec: Spec, dp: int, at: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> list[int]:
    """The ranks at these pp, cp and tp coordinates of a dp group, ascending."""
    steps = spec.layout.strides()
    base = dp * steps["dp"]
    return sorted(
        base + pp * steps["pp"] + cp * steps["cp"] + tp * steps["tp"] for pp, cp, tp in product(*at)
    )


def check_component(source: Spec, target: Spec, component: Component) -> None:
    """Raises LayoutError unless the source can give what the target calls `component`."""
    given = source.cache.by_name.get(component.name)
    if given is None:
        names = list(source.cache.by_name)
        known = ", ".join(names if len(names) < 4 else [names[0], names[1], "...", names[-1]])
        reason = f"the target needs it, but the source does not cache it; it caches {known}"
        if component.layers[0][0] >= target.cache.num_layers:
            reason += "; run drafts on both sides, or not on the target's"
        elif source.storage.granule != target.storage.granule:
            reason += "; one side moves whole pages, the other tokens: if one is vLLM, start it with split_kv"
        raise _refusal(source, target, component.name, reason)
    unequal = [
        (quantity, mine, theirs)
        for quantity, mine, theirs in (
            ("number of units", given.num_units, component.num_units),
            ("unit", given.units and given.units.name, component.units and component.units.name),
            ("sizes of one unit", _sizes(given), _sizes(component)),
            ("window", given.extent.window, component.extent.window),
            ("token dim", given.extent.has_tokens, component.extent.has_tokens),
        )
        if mine != theirs
    ]
    if unequal:
        quantity, mine, theirs = unequal[0]
        raise _refusal(source, target, component.name, f"{quantity} differs: source {mine}, target {theirs}")
    if intersection(given.layers, component.layers) != component.layers:
        raise _refusal(
            source,
            target,
            component.name,
            f"the target needs layers {text(component.layers)}, the source has {text(given.layers)}",
        )
    _check_storage(source, target, component)


def _sizes(component: Component) -> str:
    return " x ".join(f"{dim.size} {dim.name}" for dim in component.dims)


def _refusal(source: Spec, target: Spec, component: str, reason: str) -> LayoutError:
    return LayoutError(
        reason, component=component, sides=f"source {source.layout} and target {target.layout}"
    )


def _check_storage(source: Spec, target: Spec, component: Component) -> None:
    if not component.extent.has_tokens:
        return
    mine, theirs = source.storage, target.storage
    if mine.granule != theirs.granule:
        reason = f"granules differ: source {mine.granule}, target {theirs.granule} tokens"
        raise _refusal(source, target, component.name, reason)
    if mine.granule == 1:
        return
    for quantity, left, right in (
        ("page sizes", mine.page_tokens, theirs.page_tokens),
        ("dtypes", mine.dtype_of(component), theirs.dtype_of(component)),
    ):
        if left != right:
            reason = (
                f"a granule of {mine.granule} tokens moves as it is, but {quantity} differ: {left} and "
                f"{right}"
            )
            raise _refusal(source, target, component.name, reason)


def check_granules(source: Spec, target: Spec, ends: Iterable[tuple[int, int, str, Range]]) -> None:
    """Raises LayoutError where tokens that only move together lie differently on the two sides."""
    if source.storage.granule == 1:
        return
    for giver, taker, name, units in ends:
        if not target.cache.by_name[name].extent.has_tokens:
            continue
        if _inside(source, giver, name, "source") != _inside(target, taker, name, "target"):
            raise _refusal(source, target, name, "the layout inside a granule differs")
        if not (
            _can_cut(source, giver, name, units, "source") and _can_cut(target, taker, name, units, "target")
        ):
            raise _refusal(
                source, target, name, "units lie inside a granule and cannot be cut; use hnd storage"
            )


@lru_cache(maxsize=65_536)
def _inside(spec: Spec, rank: int, name: str, side: str) -> tuple[int, ...]:
    strides = placements(spec, rank, side)[name].strides
    dims = [dim.name for dim in spec.cache.by_name[name].dims]
    return tuple(strides[axis] for axis in ["token", *dims])


def _can_cut(spec: Spec, rank: int, name: str, units: Range, side: str) -> bool:
    component = spec.cache.by_name[name]
    strides = placements(spec, rank, side)[name].strides
    is_outside = strides["unit"] >= strides["token"] * spec.storage.granule
    return is_outside or box(spec, component, rank, side).units == units
