"""What this rank has measured of itself: how fast it computes, and how fast each peer takes bytes.

Everything is weighted exponentially, so that a machine that gets slower is believed. A link is fitted as
time = overhead + bytes / speed over the groups that went across it, one after another. A group's time begins
when it could have begun, computed and with the link free, so that the overhead holds everything which a group
costs beside its bytes; `cost` weighs it against short tails. What a group takes to be bound and submitted is
no such cost, since others cross meanwhile: groups that found the link idle may have taken a latency longer,
which is fitted too where others queued. Groups of one size say nothing of the overhead: there a guess speaks,
which counts for little as soon as sizes differ.

Compute is kept by powers of two of the rows in a step, since a step of a few rows costs as much as one of
some dozens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log2
from typing import NamedTuple

import numpy as np

from baton.engine.steps import CopyRecord
from baton.plan.overlap import LayerTimes
from baton.plan.tokens import Ints

KEEP = 0.7
"""How much an older measurement weighs against the one after it."""
OVERHEAD_S_DEFAULT = 5e-4
GUESS_WEIGHT = 0.02
"""Of the guessed overhead, where a hand-over weighs 1."""
GUESS_PART = 1 / 60
"""Of what groups take, at the most."""
LATENCY_WEIGHT = 0.2
"""Of the guess that there is no latency: where all groups found the link idle, what they took is overhead."""
RISE = 0.05
"""How much a longer time counts against the least of late."""
SLOWER_MAX = 2.0
"""What was measured before counts for no more than so many times what is measured now: the first steps load
kernels and the first copies map memory, and nothing is slower for having been so once."""
LATE_MAX = 4.0
"""A group counts for little more than so many times what was expected of it; a link that is slower than that
is believed a few hand-overs later."""
BYTES_PER_S_DEFAULT = 2e9
LAYER_S_DEFAULT = 1e-3
SPREAD_DEFAULT = 0.3
NUM_LINKS_MAX = 256
MB = 1e6
"""What bytes are counted in where lines are fitted, so that no number is far from the others."""
FREE = [list(free) for size in (1, 2, 3) for free in combinations(range(3), size)]
"""Which of overhead, slope and latency are not 0."""


class Point(NamedTuple):
    """A group on a link: its bytes, its time, and whether the link was idle when it was computed."""

    num_bytes: float
    seconds: float
    was_idle: bool = False


class Line:
    """Overhead, seconds per byte and latency, none of them below 0, through exponentially weighted points."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._seconds = 0.0
        self._normal = np.zeros((3, 3))
        self._right = np.zeros(3)
        self._found = np.zeros(3)
        self.overhead_s, self.byte_s = OVERHEAD_S_DEFAULT, 1 / BYTES_PER_S_DEFAULT

    def add(self, points: Sequence[Point]) -> None:
        """The points of one hand-over, which weighs 1 however many they are."""
        rows = np.array([(1.0, point.num_bytes / MB, point.was_idle) for point in points])
        seconds = np.array([point.seconds for point in points])
        if self._weight:
            expected = rows @ self._found
            if expected.sum() > seconds.sum() * SLOWER_MAX:
                self._forget()
            # A machine that stood still for a moment is no slower link.
            seconds = np.minimum(seconds, expected * LATE_MAX + OVERHEAD_S_DEFAULT)
        self._weight = self._weight * KEEP + 1.0
        self._seconds = self._seconds * KEEP + float(seconds.mean())
        self._normal = self._normal * KEEP + rows.T @ rows / len(points)
        self._right = self._right * KEEP + rows.T @ seconds / len(points)
        self._fit()

    def _forget(self) -> None:
        self._weight = self._seconds = 0.0
        self._normal, self._right = np.zeros((3, 3)), np.zeros(3)

    def _fit(self) -> None:
        guess_s = min(OVERHEAD_S_DEFAULT, self._seconds / self._weight * GUESS_PART)
        normal = self._normal + np.diag((GUESS_WEIGHT, 0.0, LATENCY_WEIGHT))
        right = self._right + np.array((GUESS_WEIGHT * guess_s, 0.0, 0.0))
        best, least = np.zeros(3), 0.0
        for free in FREE:
            found = np.zeros(3)
            found[free] = np.linalg.solve(normal[np.ix_(free, free)], right[free])
            missed = float(found @ normal @ found - 2 * right @ found)
            if (found >= 0.0).all() and missed < least:
                best, least = found, missed
        self._found = best
        self.overhead_s, self.byte_s = float(best[0]), float(best[1]) / MB


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a layer, on average, and of the rest of the last one after its cache was stored."""

    layer_s: float
    rest_s: float
    spread: float = 0.0
    """By what part of it steps have differed from what was predicted."""
    group_s: float | None = None
    """What each group took from the forward itself; None: that is not known."""
    lead_s: float = 0.0
    """From its begin on nothing leaves for so long."""
    least_s: float = 0.0
    """Seconds of a layer where nothing holds the step up: the least of late."""


class Pace:
    """The measurements of one rank; the computing thread and the endpoint's meet here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compute: dict[int, Took] = {}
        """By powers of two of the rows, seconds of a row."""
        self._links: dict[int, Line] = {}
        """By session, the one that was measured last at the end."""

    def computed(self, num_rows: int, took: Took) -> None:
        """What a step of so many rows took."""
        bucket, num_rows = _bucket(num_rows), max(1, num_rows)
        layer_s = took.layer_s / num_rows
        found = Took(layer_s, took.rest_s / num_rows, group_s=took.group_s, least_s=layer_s)
        before = self._compute.get(bucket)
        if before is None or before.layer_s <= 0.0:
            self._compute[bucket] = replace(found, spread=SPREAD_DEFAULT)
            return
        missed = min(1.0, abs(found.layer_s / before.layer_s - 1))
        before = replace(before, layer_s=min(before.layer_s, SLOWER_MAX * found.layer_s))
        self._compute[bucket] = Took(
            KEEP * before.layer_s + (1 - KEEP) * found.layer_s,
            KEEP * before.rest_s + (1 - KEEP) * found.rest_s,
            KEEP * before.spread + (1 - KEEP) * missed,
            _mean(before.group_s, found.group_s),
            least_s=min(layer_s, RISE * layer_s + (1 - RISE) * before.least_s),
        )

    def sent(self, session: int, copies: Sequence[CopyRecord], ready_s: Mapping[int, float]) -> None:
        """A hand-over is through: its groups, computed at `ready_s`, went one after another over a link."""
        if not copies:
            return
        # Groups that were computed before the grant waited for that, and not for the link.
        free_s = min(copy.submitted_s for copy in copies)
        points: list[Point] = []
        for chunk in sorted({copy.chunk for copy in copies}):
            group = [copy for copy in copies if copy.chunk == chunk]
            submitted_s = min(copy.submitted_s for copy in group)
            computed_s = min(submitted_s, ready_s.get(chunk, submitted_s))
            start_s = max(free_s, computed_s)
            was_idle = not points or computed_s >= free_s
            free_s = max(free_s, *(copy.ended_s for copy in group))
            if free_s > start_s:
                num_bytes = sum(copy.num_bytes for copy in group)
                points.append(Point(float(num_bytes), free_s - start_s, was_idle))
        if not points:
            return
        with self._lock:
            line = self._links.pop(session, None) or Line()
            line.add(points)
            self._links[session] = line
            while len(self._links) > NUM_LINKS_MAX:
                del self._links[next(iter(self._links))]

    def compute(self, num_rows: int) -> Took:
        """What a step of so many rows will take."""
        if not self._compute:
            return Took(LAYER_S_DEFAULT, 0.0, SPREAD_DEFAULT, least_s=LAYER_S_DEFAULT)
        bucket, num_rows = _bucket(num_rows), max(1, num_rows)
        nearest = self._compute[min(self._compute, key=lambda known: abs(known - bucket))]
        layer_s = nearest.layer_s * num_rows
        rest_s = min(layer_s, nearest.rest_s * num_rows)
        least_s = nearest.least_s * num_rows
        return Took(layer_s, rest_s, nearest.spread, nearest.group_s, least_s=least_s)

    def link(self, session: int) -> tuple[float, float]:
        """Overhead per group and seconds per byte of a session's link; of the last one for a new session."""
        with self._lock:
            if not self._links:
                return OVERHEAD_S_DEFAULT, 1 / BYTES_PER_S_DEFAULT
            line = self._links.get(session) or next(reversed(self._links.values()))
            return line.overhead_s, line.byte_s

    def times(self, num_layers: int, num_rows: int, layer_bytes: Mapping[int, int | Ints]) -> LayerTimes:
        """Predictions for a step, given the bytes that each session gets from a layer, or from each of them.

        What goes to several sessions leaves by one port, one after the other.
        """
        links = {session: self.link(session) for session in layer_bytes}
        transfer_s = np.zeros(num_layers)
        for session, sent in layer_bytes.items():
            transfer_s += np.asarray(sent) * links[session][1]
        overhead_s = sum(links[s][0] for s in layer_bytes)
        took = self.compute(num_rows)
        # A layer can leave before its rest is computed, so the first one is ready sooner by that.
        compute_s = (took.layer_s - took.rest_s, *(took.layer_s,) * (num_layers - 1))
        return LayerTimes(compute_s, tuple(transfer_s.tolist()), overhead_s)


def _mean(before_s: float | None, found_s: float | None) -> float | None:
    if before_s is None or found_s is None:
        return before_s if found_s is None else found_s
    return KEEP * before_s + (1 - KEEP) * found_s


def _bucket(num_rows: int) -> int:
    return int(log2(max(1, num_rows)))
