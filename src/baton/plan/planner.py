"""Who sends what to whom: boxes of one side intersected with boxes of the other.

For each component the layers, units and tokens that a source piece and a target piece have in common are
found dim by dim. A combination that is not empty is a box that some mirrors hold and some targets want;
`deal` shares it out. Nothing here knows a model, a kind or a ratio of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias, TypeVar

from baton.errors import LayoutError
from baton.plan.cache import Component
from baton.plan.compatibility import check_component, check_granules
from baton.plan.mirrors import deal
from baton.plan.ownership import END, Spec, cuts, share_stride
from baton.plan.proof import prove
from baton.plan.ranges import Range, Ranges, intersection, overlap
from baton.plan.routes import Plan, Route
from baton.plan.tokens import can_meet

Piece = TypeVar("Piece", bound=Hashable)
_Pieces: TypeAlias = list[tuple[Piece, tuple[int, ...]]]

BOXES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What two pieces have in common along one dim, and the coordinates that hold each."""

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
    found: list[Route] = []
    for component in target.cache.components:
        check_component(source, target, component)
        found.extend(_component_routes(source, target, (source_dp, target_dp), component))
    check_granules(
        source, target, [(route.source, route.target, route.component, route.units) for route in found]
    )
    result = Plan(source, target, source_dp, target_dp, tuple(found))
    prove(result)
    return result


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
    found: dict[Piece, list[int]] = {}
    for coordinate, piece in enumerate(cut):
        found.setdefault(piece, []).append(coordinate)
    return [(piece, tuple(coordinates)) for piece, coordinates in found.items()]


def _ranks(spec: Spec, dp: int, at: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> list[int]:
    """The ranks at these pp, cp and tp coordinates of a dp group, ascending."""
    steps = spec.layout.strides()
    base = dp * steps["dp"]
    return sorted(
        base + pp * steps["pp"] + cp * steps["cp"] + tp * steps["tp"] for pp, cp, tp in product(*at)
    )
