"""Where the layers of a step are cut, given what is predicted and that predictions miss.

The cuts of `cost` are the best for the times that it is given: its groups leave no slack, so that a prefill
which runs a few percent faster or slower than predicted may end with many layers still to go, and so may one
whose copies are held up by the compute beside them. Here its cuts for several speeds of compute and of
transfer are held against all of these, and the one that exposes least over all of them is taken; how far the
speeds of compute lie apart is what measurements have differed by. Only the times' proportions matter, and
steps nearly alike share their cuts: finding them takes a millisecond or two, in which a GPU may have nothing
to do.

Where the host launches layers before it thinks of anything else, nothing leaves before it does; then all that
is computed can.

A group also takes time from the forward, where that waits for the host: both are this process's time. On a
GPU it is measured, and there is none of it while the host is ahead; else it is taken for a part of the
overhead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, log

from baton.engine.rank.pace import Took
from baton.plan.overlap import Groups, LayerTimes, choose

COST = "cost"
SPREADS = (0.07, 0.15, 0.3, 0.5)
"""By how much compute may be off its prediction, either way."""
SLOWER = (1.3, 2.0)
"""A copy beside compute may take so many times as long as one alone."""
GROUP_COST = 0.25
"""What a group takes from the forward itself, as a part of its overhead, where it is not measured."""
TRANSFER_STEP = 0.05
SHARE_STEP = 0.05
OVERHEAD_STEP = 0.5
REST_STEP = 0.1
LEAD_STEP = 1.0
LEAST = 1e-4
"""Of a layer's compute; less is nothing."""
EQUAL = (1, 2, 4, 8)
NUM_KEPT = 64


@dataclass(slots=True)
class Cuts:
    """The groups of steps, with those of the latest ones, which speak for steps nearly alike."""

    _kept: deque[tuple[Shape, int, Groups]] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    def of(self, policy: str, times: LayerTimes, avg_tokens: int, took: Took) -> Groups:
        """The groups of a policy; of `cost` those that hold too if compute is off by what it has been."""
        if policy != COST or times.num_layers == 1 or times.compute_s[-1] <= 0.0:
            return choose(policy, times, avg_tokens)
        shape, level = Shape.of(times, took), sum(each < took.spread for each in SPREADS[:-1])
        for known, known_level, groups in self._kept:
            if abs(known_level - level) <= 1 and known.is_near(shape):
                return groups
        groups = _tolerant(shape, SPREADS[level])
        self._kept.appendleft((shape, level, groups))
        return groups


@dataclass(frozen=True, slots=True)
class Shape:
    """A step's times by what a layer's compute takes."""

    shares: tuple[float, ...]
    """What each layer has to transfer, by what a layer has on average."""
    transfer: float
    overhead: float
    rest: float
    group: float | None = None
    """What each group takes from the forward, if that is known."""
    lead: float = 0.0
    """Before when nothing leaves."""

    @staticmethod
    def of(times: LayerTimes, took: Took) -> Shape:
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
            None if took.group_s is None else _rounded(took.group_s / layer_s, OVERHEAD_STEP),
            min(times.num_layers, round(took.lead_s / layer_s / LEAD_STEP) * LEAD_STEP),
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
            and abs(self.lead - other.lead) < 1.5 * LEAD_STEP
            and (self.group is None) == (other.group is None)
            and _are_near(self.group or 0.0, other.group or 0.0, OVERHEAD_STEP)
        )

    def at(self, compute: float, transfer: float) -> World:
        """With compute and transfer at so many times their predictions."""
        ready = (
            0.0,
            *(max(self.lead, compute * (each - self.rest)) for each in range(1, self.num_layers + 1)),
        )
        compute_s = tuple(after - before for before, after in pairwise(ready))
        transfer_s = tuple(transfer * self.transfer * share for share in self.shares)
        costly = LayerTimes(compute_s, transfer_s, self.overhead + (self.group or 0.0))
        return World(
            costly,
            ready,
            (0.0, *accumulate(transfer_s)),
            self.overhead,
            compute * self.num_layers,
        )


@dataclass(frozen=True, slots=True)
class World:
    """A step at one speed of compute and one of transfer."""

    times: LayerTimes
    """With what groups take from the forward as a part of the overhead."""
    ready: tuple[float, ...]
    """By how many layers there are: when they are computed, if no group takes from that."""
    sent: tuple[float, ...]
    overhead: float
    compute: float

    def exposed(self, groups: Groups, group: float) -> float:
        """What is left at the end of compute, where each group takes so much from its last layer's."""
        finish = 0.0
        for index, (start, stop) in enumerate(groups, 1):
            link = self.overhead + self.sent[stop] - self.sent[start]
            finish = max(finish, self.ready[stop] + group * index) + link
        return max(0.0, finish - self.compute - group * len(groups))


def _tolerant(shape: Shape, spread: float) -> Groups:
    speeds = ((1 - spread, 1.0), (1.0, 1.0), (1 + spread, 1.0), *((1.0, slower) for slower in SLOWER))
    worlds = [shape.at(*speed) for speed in speeds]
    group, fee = (0.0, GROUP_COST * shape.overhead) if shape.group is None else (shape.group, shape.group)
    # Equal groups are never the best and never far off it, where a group costs little or takes from compute.
    sizes = EQUAL if group else EQUAL[:2]
    equal = (choose(f"fixed:{size}", worlds[0].times, 0) for size in sizes)
    candidates = dict.fromkeys((*(choose(COST, world.times, 0) for world in worlds), *equal))

    def cost(groups: Groups) -> float:
        exposed = sum(world.exposed(groups, group) for world in worlds)
        return exposed / len(worlds) + fee * len(groups)

    return min(candidates, key=cost)


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
