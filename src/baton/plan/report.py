"""A plan for one prompt as plain data: the stable contract behind `baton plan --json`.

Version 1. Fields are added, never renamed or given another meaning; a change of meaning is a new version.

`estimates` predicts the time of a hand-over on given links, with and without overlap; nothing is measured.
Every rank has one link of the given speed each way. A layer's transfer takes as long as the busiest rank,
at either end, needs for its bytes of that layer. Compute is 2 x active parameters x new tokens at a stated
speed per rank, spread evenly over layers and over the ranks that share one layer; attention's own part is
left out, so long prompts hide more than is shown.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from baton.plan.cache import Component
from baton.plan.checker import check
from baton.plan.chunks import Pair, PairChunk, Tables, bound_plan, pairs_alike
from baton.plan.dtypes import item_bytes
from baton.plan.overlap import LayerTimes, Outcome, choose, measure
from baton.plan.ownership import Spec
from baton.plan.ranges import to_ids
from baton.plan.routes import BoundRoute, Plan, Prompt, resolve
from baton.plan.steps import PACK, PackCost
from baton.plan.tokens import Ints, TokenSet

VERSION = 1


@dataclass(frozen=True)
class Report:
    """Everything that can be said of one hand-over before it happens."""

    model: str
    plan: Plan
    prompt: Prompt
    cost: PackCost

    @cached_property
    def routes(self) -> tuple[BoundRoute, ...]:
        """The routes of this prompt, checked independently of the planner."""
        routes = resolve(self.plan, self.prompt)
        check(self.plan, self.prompt, routes)
        return routes

    @cached_property
    def _pairs(self) -> list[tuple[tuple[Pair, ...], PairChunk]]:
        """Pairs of ranks that bind alike, with what each of them moves of the whole prompt."""
        bound = bound_plan(self.plan, self.prompt)
        moved = [(pairs, bound.whole(pairs[0])) for pairs in pairs_alike(self.plan)]
        return [(pairs, chunk) for pairs, chunk in moved if chunk.parts]

    @cached_property
    def copy_sizes(self) -> dict[int, int]:
        """How many copies there are of every size in bytes, ascending; a packed pair has one copy."""
        tables = Tables(
            _scattered(self.plan.source, self.plan.source_dp, self.prompt),
            _scattered(self.plan.target, self.plan.target_dp, self.prompt),
        )
        totals: Counter[int] = Counter()
        for pairs, chunk in self._pairs:
            lengths = np.concatenate(
                [copy.spans.length for copy in chunk.copies(tables, chunk.mode(self.cost))]
            )
            sizes, counts = np.unique(lengths, return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                totals[size] += count * len(pairs)
        return dict(sorted(totals.items()))

    @property
    def num_copies(self) -> int:
        """Copies between ranks."""
        return sum(self.copy_sizes.values())

    @property
    def copy_bytes_median(self) -> float:
        """The middle size of a copy, or the mean of the two in the middle; 0 where nothing moves."""
        middle = [self._nth_size((self.num_copies - 1) // 2), self._nth_size(self.num_copies // 2)]
        return sum(middle) / 2

    def _nth_size(self, index: int) -> int:
        for size, count in self.copy_sizes.items():
            index -= count
            if index < 0:
                return size
        return 0

    @cached_property
    def packed_pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks whose copies are gathered first."""
        packed = (pairs for pairs, chunk in self._pairs if chunk.mode(self.cost) == PACK)
        return sorted(pair for pairs in packed for pair in pairs)

    @cached_property
    def num_direct_copies(self) -> int:
        """Copies if nothing were packed."""
        return sum(len(pairs) * part.num_spans for pairs, chunk in self._pairs for part in chunk.parts)

    @cached_property
    def bytes_by_source(self) -> list[int]:
        """Bytes that every rank of the source side sends, all dp groups counted."""
        return self._bytes([(route.source, route.num_bytes) for route in self.routes], self.plan.source)

    @cached_property
    def bytes_by_target(self) -> list[int]:
        """Bytes that every rank of the target side gets, all dp groups counted."""
        return self._bytes([(route.target, route.num_bytes) for route in self.routes], self.plan.target)

    @staticmethod
    def _bytes(entries: list[tuple[int, int]], spec: Spec) -> list[int]:
        totals = [0] * spec.layout.num_ranks
        for rank, num_bytes in entries:
            totals[rank] += num_bytes
        return totals

    @cached_property
    def idle_sources(self) -> list[int]:
        """Ranks of the chosen source group that send nothing."""
        return [
            rank
            for rank in self.plan.source.layout.group(self.plan.source_dp)
            if not self.bytes_by_source[rank]
        ]

    def as_json(self) -> dict[str, Any]:
        """The contract's fields in its order."""
        sets: dict[TokenSet, int] = {}
        for route in self.routes:
            if route.tokens is not None:
                sets.setdefault(route.tokens, len(sets))
        plan, storage = self.plan, self.plan.source.storage
        median = self.copy_bytes_median
        return {
            "version": VERSION,
            "model": self.model,
            "tokens": self.prompt.num_tokens,
            "skip_tokens": max(self.prompt.held.values(), default=0),
            "source": _side(plan.source, plan.source_dp),
            "target": _side(plan.target, plan.target_dp),
            "components": [_component(part, storage.dtype_of(part)) for part in plan.target.cache.components],
            "token_sets": [[list(item) for item in tokens] for tokens in sets],
            "routes": [_route(route, sets) for route in self.routes],
            "bytes": {
                "total": sum(self.bytes_by_source),
                "by_source": self.bytes_by_source,
                "by_target": self.bytes_by_target,
            },
            "copies": {
                "count": self.num_copies,
                "bytes_median": int(median) if median.is_integer() else median,
                "packed_pairs": len(self.packed_pairs),
            },
            "idle_sources": self.idle_sources,
        }


def _side(spec: Spec, dp: int) -> dict[str, Any]:
    layout, storage = spec.layout, spec.storage
    side = {"layout": layout.text, "ranks": layout.num_ranks, "page": storage.page_tokens, "dp": dp}
    if storage.placements:
        side["placements"] = [asdict(declared) for declared in storage.placements]
    return side


def _component(component: Component, dtype: str) -> dict[str, Any]:
    return {
        "name": component.name,
        "layers": [list(layers) for layers in component.layers],
        "units": component.units.count if component.units else None,
        "window": component.extent.window,
        "bytes_per_unit": component.num_elements * item_bytes(dtype),
    }


def _route(route: BoundRoute, sets: dict[TokenSet, int]) -> dict[str, Any]:
    return {
        "source": route.source,
        "target": route.target,
        "component": route.component,
        "layers": [list(layers) for layers in route.layers],
        "units": list(route.units) if route.units is not None else None,
        "tokens": sets[route.tokens] if route.tokens is not None else None,
        "bytes": route.num_bytes,
    }


def pages_needed(spec: Spec, prompt: Prompt) -> dict[str, int]:
    """Pages of every group for pools in which no two pages of a prompt are neighbours."""
    stateless = {c.group for c in spec.cache.components if c.extent.has_tokens}
    pages = 2 * -(-prompt.num_tokens // spec.storage.page_tokens)
    return {group: pages if group in stateless else 1 for group in spec.cache.groups}


def _scattered(spec: Spec, dp: int, prompt: Prompt) -> dict[int, dict[str, Ints]]:
    counts = pages_needed(spec, prompt)
    tables = {group: np.arange(0, count, 2, dtype=np.int64) for group, count in counts.items()}
    return dict.fromkeys(spec.layout.group(dp), tables)


LINK_GBPS = (100, 200, 400)
FLOPS_PER_RANK = 400e12
GROUP_OVERHEAD_S = 50e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """One link speed: the groups of the cost policy, and what compute-then-transfer would take."""

    link_gbps: int
    serial_s: float
    num_groups: int
    overlapped: Outcome


def layer_bytes(report: Report) -> list[int]:
    """For each layer the bytes through the busiest rank of either side."""
    last = max(stop for component in report.plan.target.cache.components for _, stop in component.layers)
    busiest = np.zeros(last, dtype=np.int64)
    for end in ("source", "target"):
        spec = report.plan.source if end == "source" else report.plan.target
        loads = np.zeros((spec.layout.num_ranks, last), dtype=np.int64)
        for route in report.routes:
            layers = to_ids(route.layers)
            loads[getattr(route, end), layers] += route.num_bytes // len(layers)
        busiest = np.maximum(busiest, loads.max(axis=0))
    return [int(value) for value in busiest]


def compute_s(report: Report, active_parameters: float) -> float:
    """Seconds of prefill for what is not held, on the source's ranks."""
    layout = report.plan.source.layout
    new_tokens = report.prompt.num_tokens - max(report.prompt.held.values(), default=0)
    sharing = layout.size("tp") * layout.size("cp")
    return 2 * active_parameters * new_tokens / (FLOPS_PER_RANK * sharing)


def estimates(report: Report, active_parameters: float | None) -> list[Estimate]:
    """One estimate per link speed; without a parameter count compute is taken as nothing."""
    by_layer = layer_bytes(report)
    total_s = compute_s(report, active_parameters) if active_parameters else 0.0
    per_layer = (total_s / len(by_layer),) * len(by_layer)
    by_link = []
    for gbps in LINK_GBPS:
        transfer = tuple(num_bytes * 8 / (gbps * 1e9) for num_bytes in by_layer)
        times = LayerTimes(per_layer, transfer, GROUP_OVERHEAD_S)
        groups = choose("cost", times, report.prompt.num_tokens)
        serial_s = measure(times, choose("off", times, report.prompt.num_tokens)).completion_s
        by_link.append(Estimate(gbps, serial_s, len(groups), measure(times, groups)))
    return by_link
