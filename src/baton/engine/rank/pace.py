"""What this rank has measured of itself: how fast it computes, and how fast each peer takes bytes.

Everything is weighted exponentially, so that a machine that gets slower is believed. A link is fitted as
time = overhead + bytes / speed over the groups that went across it, one after another; the overhead is what
`cost` weighs against short tails. Compute is kept by powers of two of the rows in a step, since a step of a
few rows costs as much as one of some dozens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

from baton.engine.steps import CopyRecord
from baton.plan.overlap import LayerTimes

KEEP = 0.8
"""How much an older measurement weighs against the one after it."""
OVERHEAD_S_DEFAULT = 5e-4
BYTES_PER_S_DEFAULT = 2e9
LAYER_S_DEFAULT = 1e-3


@dataclass(slots=True)
class Line:
    """A straight line through exponentially weighted points, with an intercept and a slope of at least 0."""

    weight: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)

    def add(self, x: float, y: float) -> None:
        """One more point."""
        self.weight = self.weight * KEEP + 1.0
        for index, value in enumerate((x, y, x * x, x * y)):
            self.sums[index] = self.sums[index] * KEEP + value

    def fit(self) -> tuple[float, float]:
        """Intercept and slope; through the origin where the points lie too close together to tell."""
        x, y, xx, xy = self.sums
        spread = self.weight * xx - x * x
        if spread <= 1e-6 * x * x:
            return 0.0, y / x
        slope = (self.weight * xy - x * y) / spread
        intercept = (y - slope * x) / self.weight
        if slope <= 0.0:
            return y / self.weight, 0.0
        if intercept < 0.0:
            return 0.0, xy / xx
        return intercept, slope


class Pace:
    """The measurements of one rank."""

    def __init__(self) -> None:
        self._layer_s: dict[int, float] = {}
        self._links: dict[int, Line] = {}

    def computed(self, num_rows: int, layer_s: float) -> None:
        """A step of so many rows took so long per layer."""
        bucket = _bucket(num_rows)
        before = self._layer_s.get(bucket)
        per_row = layer_s / max(1, num_rows)
        self._layer_s[bucket] = per_row if before is None else KEEP * before + (1 - KEEP) * per_row

    def sent(self, session: int, copies: Sequence[CopyRecord]) -> None:
        """A hand-over is through: its groups went one after another over the link of a session."""
        line, free_s = self._links.setdefault(session, Line()), 0.0
        for chunk in sorted({copy.chunk for copy in copies}):
            group = [copy for copy in copies if copy.chunk == chunk]
            start_s = max(free_s, min(copy.submitted_s for copy in group))
            free_s = max(free_s, max(copy.ended_s for copy in group))
            if free_s > start_s:
                line.add(float(sum(copy.num_bytes for copy in group)), free_s - start_s)

    def layer_s(self, num_rows: int) -> float:
        """What a layer of so many rows will take."""
        if not self._layer_s:
            return LAYER_S_DEFAULT
        bucket = _bucket(num_rows)
        nearest = min(self._layer_s, key=lambda known: abs(known - bucket))
        return self._layer_s[nearest] * max(1, num_rows)

    def link(self, session: int) -> tuple[float, float]:
        """Overhead per group and seconds per byte of a session's link."""
        line = self._links.get(session)
        if line is None or not line.weight:
            known = [found.fit() for found in self._links.values() if found.weight]
            return known[-1] if known else (OVERHEAD_S_DEFAULT, 1 / BYTES_PER_S_DEFAULT)
        return line.fit()

    def times(self, num_layers: int, num_rows: int, layer_bytes: dict[int, int]) -> LayerTimes:
        """Predictions for a step, given the bytes that each session gets from one layer."""
        links = {session: self.link(session) for session in layer_bytes}
        transfer_s = max((layer_bytes[s] * links[s][1] for s in layer_bytes), default=0.0)
        overhead_s = max((links[s][0] for s in layer_bytes), default=0.0)
        return LayerTimes((self.layer_s(num_rows),) * num_layers, (transfer_s,) * num_layers, overhead_s)


def _bucket(num_rows: int) -> int:
    return int(log2(max(1, num_rows)))
