"""Where the layers of a step are cut, given what is predicted and that predictions miss.

The cuts of `cost` are the best for the times that it is given: its groups leave no slack, so that a prefill
which runs a few percent faster or slower than predicted may end with many layers still to go, and so may one
whose copies are held up by the compute beside them. Here its cuts for several speeds of compute and of
transfer are held against all of these, and the one that exposes least over all of them is taken; how far the
speeds of compute lie apart is what measurements have differed by. Only the times' proportions matter, and
steps nearly alike share their cuts: finding them takes a millisecond or two, in which a GPU may have nothing
to do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log

from baton.plan.overlap import Groups, LayerTimes, choose, completion_s

COST = "cost"
SPREADS = (0.07, 0.15, 0.3, 0.5)
"""By how much compute may be off its prediction, either way."""
SLOWER = (1.3, 2.0)
"""A copy beside compute may take so many times as long as one alone."""
GROUP_COST = 0.25
"""What a group takes from the forward itself, as a part of its overhead: both are this process's time."""
TRANSFER_STEP = 0.05
SHARE_STEP = 0.05
OVERHEAD_STEP = 0.5
REST_STEP = 0.1
LEAST = 1e-4
"""Of a layer's compute; less is nothing."""
NUM_KEPT = 16


@dataclass(slots=True)
class Cuts:
    """The groups of steps, with those of the latest ones, which speak for steps nearly alike."""

    _kept: deque[tuple[Shape, int, Groups]] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    def of(self, policy: str, times: LayerTimes, avg_tokens: int, spread: float = 0.0) -> Groups:
        """The groups of a policy; of `cost` those that hold too if compute is off by a part `spread`."""
        if policy != COST or times.num_layers == 1 or times.compute_s[-1] <= 0.0:
            return choose(policy, times, avg_tokens)
        shape, level = Shape.of(times), sum(each < spread for each in SPREADS[:-1])
        for known, known_level, groups in self._kept:
            if abs(known_level - level) <= 1 and known.is_near(shape):
                return groups
        groups = _tolerant(shape, SPREADS[level])
        self._kept.appendleft((shape, level, groups))
        return groups


def cut(policy: str, times: LayerTimes, avg_tokens: int, spread: float = 0.0) -> Groups:
    """The groups of one step."""
    return Cuts().of(policy, times, avg_tokens, spread)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step's times by what a layer's compute takes."""

    shares: tuple[float, ...]
    """What each layer has to transfer, by what a layer has on average."""
    transfer: float
    overhead: float
    rest: float

    @staticmethod
    def of(times: LayerTimes) -> Shape:
        """Rounded, so that steps alike have one shape."""
        layer_s = times.compute_s[-1]
        rest = 1 - times.compute_s[0] / layer_s
        mean_s = sum(times.transfer_s) / times.num_layers
        shares = [1.0 if mean_s <= 0.0 else each / mean_s for each in times.transfer_s]
        return Shape(
            tuple(round(share / SHARE_STEP) * SHARE_STEP for share in shares),
            _rounded(mean_s / layer_s, TRANSFER_STEP),
            _rounded(times.overhead_s / layer_s, OVERHEAD_STEP),
            min(1.0, max(0.0, round(rest / REST_STEP) * REST_STEP)),
        )

    @property
    def num_layers(self) -> int:
        """How many there are."""
        return len(self.shares)

    def is_near(self, other: Shape) -> bool:
        """Whether another shape is no more than a step of rounding away in anything."""
        return (
            self.shares == other.shares
            and _are_near(self.transfer, other.transfer, TRANSFER_STEP)
            and _are_near(self.overhead, other.overhead, OVERHEAD_STEP)
            and abs(self.rest - other.rest) < 1.5 * REST_STEP
        )

    def at(self, compute: float, transfer: float) -> LayerTimes:
        """With compute and transfer at so many times their predictions."""
        compute_s = (compute * (1 - self.rest), *(compute,) * (self.num_layers - 1))
        transfer_s = tuple(transfer * self.transfer * share for share in self.shares)
        return LayerTimes(compute_s, transfer_s, self.overhead)


@lru_cache(maxsize=4096)
def _tolerant(shape: Shape, spread: float) -> Groups:
    speeds = ((1 - spread, 1.0), (1.0, 1.0), (1 + spread, 1.0), *((1.0, slower) for slower in SLOWER))
    worlds = {speed: shape.at(*speed) for speed in speeds}
    # Equal small groups are never the best and never far off it, where a group costs little.
    equal = (choose(policy, worlds[1.0, 1.0], 0) for policy in ("fixed:1", "fixed:2"))
    candidates = dict.fromkeys((*(choose(COST, times, 0) for times in worlds.values()), *equal))

    def exposed(groups: Groups) -> float:
        ends = (
            (completion_s(times, groups), compute * shape.num_layers)
            for (compute, _), times in worlds.items()
        )
        return sum(max(0.0, last - compute) for last, compute in ends) / len(worlds)

    return min(candidates, key=lambda groups: exposed(groups) + GROUP_COST * shape.overhead * len(groups))


def _are_near(one: float, other: float, step: float) -> bool:
    """Whether two numbers that were rounded by a step are neighbours, or the same."""
    if min(one, other) <= 0.0:
        return one == other
    return abs(log(one / other)) < 1.5 * log(1 + step)


def _rounded(value: float, step: float) -> float:
    """To a power of 1 + step."""
    if value < LEAST:
        return 0.0
    base = log(1 + step)
    return exp(round(log(value) / base) * base)
