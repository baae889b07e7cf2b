"""Estimates the time of a hand-over on given links, with and without overlap; nothing is measured.

Every rank has one link of the given speed each way. A layer's transfer takes as long as the busiest rank,
at either end, needs for its bytes of that layer. Compute is 2 x active parameters x new tokens at a stated
speed per rank, spread evenly over layers and over the ranks that share one layer; attention's own part is
left out, so long prompts hide more than is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.plan.overlap import LayerTimes, Outcome, choose, measure
from baton.plan.ranges import to_ids
from baton.plan.report import Report

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
