"""Predicts the time of a step, and groups its layers so that the hand-over is complete soonest.

**CostModel** measures. Compute is averaged by powers of two of the rows in a step, since a step of a few rows
takes as long as one of some dozens. A link is fitted as time = overhead + bytes / speed over the groups that
crossed it, of all hand-overs that shared it. A group's time begins when the group is computed and the link is
free, so the overhead holds all that a group costs besides its bytes; where several prompts leave in a step,
each of them has its own. A group that finds the link idle may take a latency longer, to be bound
and submitted; other groups hide that behind the copy before them, so it is fitted apart.

**GroupPlanner** chooses the groups of least predicted completion, from the begin of the forward to the last
byte at the target; `baton.plan.overlap` defines and finds it. A single group takes nothing from the forward,
so `off` is compute plus the whole transfer. A grouping is chosen only if it beats that.

Predictions miss. The grouping that is best for the predicted times leaves no slack, so the best ones for
several speeds of compute and of transfer are compared over all of these speeds. And what the model does not
know is learned from the outcome: `late` is how much longer hand-overs took than predicted, with groups and
without. On a GPU that several processes share, copies beside the compute of a large step hardly move,
while those of a small step do; and prompts that leave whole arrive one after the other, but in groups nearly
all at the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import inf, isclose, log2
from operator import sub

import numpy as np

from baton.engine.commands import CopyRecord
from baton.plan import Spec
from baton.plan.cache import Extent
from baton.plan.dtypes import item_bytes
from baton.plan.overlap import Groups, LayerTimes, choose, completion_s
from baton.plan.ownership import box
from baton.plan.ranges import Range, overlap, to_ids
from baton.plan.tokens import Ints

COST = "cost"

# Before the first measurement.
OVERHEAD_S_DEFAULT = 5e-4
BYTES_PER_S_DEFAULT = 2e9
LAYER_S_DEFAULT = 1e-3
SPREAD_DEFAULT = 0.3

KEEP = 0.7
"""Weight of the older measurements against a new one."""
SLOWER_MAX = 2.0
"""Older measurements count for at most this many times the new one. The first step loads kernels and the
first copy maps memory: on an H200 a first step of 0.9 s otherwise distorted the predictions of many steps of
30 ms."""
LATE_MAX = 4.0
"""A group counts for at most this many times what was expected. On an H200, 5 of about 140 hand-overs stood
still for 50 to 135 ms and otherwise spoiled the fit of its link for the next five. A slower link is believed
a few hand-overs later."""
LEAST_RISE = 0.05
"""Weight of a longer time in the least time of a layer."""
GROUP_S_DECAY = 0.02
"""While steps have no groups, the remembered `group_s` shrinks by this part each: groups are tried again
after some dozens of steps, so that one bad measurement does not turn them off for good."""
OVERHEAD_PRIOR_WEIGHT, OVERHEAD_PRIOR_PART = 0.02, 1 / 60
"""Groups of one size say nothing of the overhead. A prior, at most this part of a group's time, decides there
and counts for little as soon as sizes differ."""
LATENCY_PRIOR_WEIGHT = 0.2
"""Of a latency of 0: where every group found the link idle, what they took is overhead."""
FREE_TERMS = np.array(list(product((False, True), repeat=3))[1:])
"""Which of overhead, slope and latency are above 0, in every combination."""
MB = 1e6
NUM_LINKS_MAX = 256
UNFITTED_MAX = 128
"""Groups after which a link is fitted although hand-overs are under way."""

LATE_STEP = 1.4
"""One hand-over changes what is learned of lateness by at most this factor, before it is averaged."""
LATE_DECAY = 0.02
"""Lateness that is not seen again is forgotten by this part with each step: what lost is tried again."""

GROUP_COST = 0.25
"""What a group takes from the forward, as a part of its overhead, where that is not measured (on a CPU)."""
SPREAD_MIN, SPREAD_MAX = 0.07, 0.5
SLOWER_COPIES = (1.3, 2.0)
"""A copy beside compute may take this many times as long as one alone. Without these, 32K tokens at 25 GB/s
on an H200 were cut into 24, 7 and 1 layers and exposed 45 ms."""
EQUAL_POLICIES = ("fixed:1", "fixed:2", "fixed:4", "fixed:8")
"""Equal groups are never the best for one speed, and never far off at any."""
NUM_PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The measured or predicted time of a step."""

    layer_s: float
    """Of a layer, on average."""
    rest_s: float = 0.0
    """Of the last layer, after its cache entries were stored."""
    spread: float = 0.0
    """By what part of it steps have differed from the prediction."""
    group_s: float | None = None
    """What each group of layers of each prompt took from the forward; None: not measured."""
    least_s: float = 0.0
    """Of a layer in recent steps that nothing slowed down."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The predicted times of a step whose layers are to be grouped."""

    layer_s: float
    rest_s: float
    transfer_s: tuple[float, ...]
    """By layer."""
    overhead_s: float
    """On the link, for each group."""
    group_s: float
    """Taken from the forward by each group but the last."""
    spread: float = 0.0
    lead_s: float = 0.0
    """Nothing leaves before this time, since the host launches layers first."""
    busy_s: float = 0.0
    """Until when hand-overs of earlier steps have the link."""

    def layer_times(self, compute: float = 1.0, transfer: float = 1.0) -> LayerTimes:
        """By layer, at so many times the predicted compute and transfer."""
        layer_s, rest_s, num_layers = compute * self.layer_s, compute * self.rest_s, len(self.transfer_s)
        compute_s = (layer_s - rest_s, *(layer_s,) * (num_layers - 1))
        if self.lead_s > 0.0:
            ready_s = [max(self.lead_s, seconds) for seconds in accumulate(compute_s)]
            compute_s = tuple(map(sub, ready_s, (0.0, *ready_s)))
            rest_s = max(0.0, num_layers * layer_s - ready_s[-1])
        transfer_s = self.transfer_s
        if transfer != 1.0:
            transfer_s = tuple(transfer * seconds for seconds in transfer_s)
        return LayerTimes(compute_s, transfer_s, self.overhead_s, self.group_s, rest_s, self.busy_s)

    def is_near(self, other: StepPrediction) -> bool:
        """Whether the groups of one serve the other: only the proportions to a layer's compute matter."""

        def near(ours_s: float, theirs_s: float, part: float, layers: float = 1e-4) -> bool:
            return isclose(ours_s / self.layer_s, theirs_s / other.layer_s, rel_tol=part, abs_tol=layers)

        return (
            abs(self.spread - other.spread) <= 0.15
            and near(self.overhead_s, other.overhead_s, 0.4)
            and near(self.group_s, other.group_s, 0.4)
            and near(self.rest_s, other.rest_s, 0.0, layers=0.15)
            and near(self.lead_s, other.lead_s, 0.0, layers=1.5)
            and near(self.busy_s, other.busy_s, 0.0, layers=1.5)
            and len(self.transfer_s) == len(other.transfer_s)
            and all(map(lambda ours, theirs: near(ours, theirs, 0.07), self.transfer_s, other.transfer_s))
        )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The prediction for a step that hands prompts over."""

    num_rows: int
    num_prompts: int
    is_grouped: bool
    begun_s: float
    completion_s: float


class GroupPlanner:
    """Chooses the groups of a step. Plans are kept: finding one takes the launching thread a millisecond."""

    def __init__(self) -> None:
        self._plans: deque[tuple[StepPrediction, Groups]] = deque(maxlen=NUM_PLANS_KEPT)

    def plan(self, policy: str, prediction: StepPrediction, num_tokens: int, late: float = 1.0) -> Groups:
        """The groups of a policy; those of `cost` only if they are expected to beat a single group.

        `late` is by how much later than predicted groups are than a single one.
        """
        times = prediction.layer_times()
        if policy != COST or times.num_layers == 1 or prediction.layer_s <= 0.0:
            return choose(policy, times, num_tokens)
        groups = next((groups for known, groups in self._plans if known.is_near(prediction)), None)
        if groups is None:
            groups = _most_robust(prediction)
            self._plans.appendleft((prediction, groups))
        whole = ((0, times.num_layers),)
        grouped_s, whole_s = completion_s(times, groups), completion_s(times, whole)
        return groups if grouped_s * late < whole_s else whole


def _most_robust(prediction: StepPrediction) -> Groups:
    """Of the groupings that are best at some speed, the one that is complete soonest over all speeds."""
    spread = min(max(prediction.spread, SPREAD_MIN), SPREAD_MAX)
    speeds = [(1.0, 1.0), (1 - spread, 1.0), (1 + spread, 1.0), *((1.0, slower) for slower in SLOWER_COPIES)]
    times = [prediction.layer_times(*speed) for speed in speeds]
    best = (choose(COST, at_speed, 0) for at_speed in times)
    equal = (choose(policy, times[0], 0) for policy in EQUAL_POLICIES)
    candidates = dict.fromkeys((choose("off", times[0], 0), *best, *equal))
    return min(candidates, key=lambda groups: sum(completion_s(at_speed, groups) for at_speed in times))


class LinkModel:
    """Overhead, seconds per byte and latency of a link, by exponentially weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._seconds = 0.0
        self._normal, self._right = np.zeros((3, 3)), np.zeros(3)
        self._terms = np.zeros(3)
        self.overhead_s, self.byte_s = OVERHEAD_S_DEFAULT, 1 / BYTES_PER_S_DEFAULT

    def add(self, groups: Sequence[tuple[int, float, bool]]) -> None:
        """The groups of one hand-over, as (bytes, seconds, found the link idle); together they weigh 1."""
        rows = np.array([(1.0, num_bytes / MB, was_idle) for num_bytes, _, was_idle in groups])
        seconds = np.array([seconds for _, seconds, _ in groups])
        if self._weight:
            expected = rows @ self._terms
            if expected.sum() > seconds.sum() * SLOWER_MAX:
                self._weight = self._seconds = 0.0
                self._normal, self._right = np.zeros((3, 3)), np.zeros(3)
            seconds = np.minimum(seconds, expected * LATE_MAX + OVERHEAD_S_DEFAULT)
        self._weight = self._weight * KEEP + 1.0
        self._seconds = self._seconds * KEEP + float(seconds.mean())
        self._normal = self._normal * KEEP + rows.T @ rows / len(groups)
        self._right = self._right * KEEP + rows.T @ seconds / len(groups)
        self._fit()

    def _fit(self) -> None:
        prior_s = min(OVERHEAD_S_DEFAULT, self._seconds / self._weight * OVERHEAD_PRIOR_PART)
        normal = self._normal + np.diag((OVERHEAD_PRIOR_WEIGHT, 0.0, LATENCY_PRIOR_WEIGHT))
        right = self._right + np.array((OVERHEAD_PRIOR_WEIGHT * prior_s, 0.0, 0.0))
        # All combinations in one call: beside a forward, this takes the interpreter from who launches it.
        both = FREE_TERMS[:, :, None] & FREE_TERMS[:, None, :]
        systems = np.where(both, normal, np.eye(3))
        terms = np.linalg.solve(systems, np.where(FREE_TERMS, right, 0.0)[..., None])[..., 0]
        errors = np.einsum("ki,ij,kj->k", terms, normal, terms) - 2 * terms @ right
        errors[(terms < 0.0).any(axis=1)] = 0.0
        best = terms[errors.argmin()] if errors.min() < 0.0 else np.zeros(3)
        self._terms = best
        self.overhead_s, self.byte_s = float(best[0]), float(best[1]) / MB


class CostModel:
    """The measurements of one rank; the compute thread and the endpoint's both add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, StepTiming] = {}
        """By powers of two of the rows, in seconds per row."""
        self._links: dict[int, LinkModel] = {}
        """By session, the one measured last at the end."""
        self._unfitted: dict[int, list[tuple[float, float, int]]] = {}
        """By session, the groups that crossed its link since it was fitted: (end, computed, bytes)."""
        self._num_open = 0
        """Hand-overs under way, whose copies are not known yet."""
        self._late: dict[tuple[int, int, bool], float] = {}
        """How many times the predicted time hand-overs took lately, from the begin of the forward on.

        By powers of two of the rows and of the prompts in a step, and whether it had groups."""

    def add_step(self, num_rows: int, timing: StepTiming, *, num_groups: int = 0) -> None:
        """What a step of so many rows took; `num_groups` is 0 where it handed nothing over."""
        bucket, num_rows = _bucket(num_rows), max(1, num_rows)
        layer_s, rest_s = timing.layer_s / num_rows, timing.rest_s / num_rows
        before = self._steps.get(bucket)
        if before is None or before.layer_s <= 0.0:
            self._steps[bucket] = StepTiming(layer_s, rest_s, SPREAD_DEFAULT, timing.group_s, layer_s)
            return
        group_s = timing.group_s
        if group_s is None and before.group_s is not None:
            group_s = before.group_s * (1 - GROUP_S_DECAY if num_groups else 1.0)
        elif group_s is not None and before.group_s is not None:
            group_s = _mean(before.group_s, group_s)
        self._steps[bucket] = StepTiming(
            _mean(min(before.layer_s, SLOWER_MAX * layer_s), layer_s),
            _mean(before.rest_s, rest_s),
            _mean(before.spread, min(1.0, abs(layer_s / before.layer_s - 1))),
            group_s,
            min(layer_s, LEAST_RISE * layer_s + (1 - LEAST_RISE) * before.least_s),
        )

    def begin_copies(self) -> None:
        """A hand-over begins; `add_copies` ends it, with what was copied."""
        with self._lock:
            self._num_open += 1

    def add_copies(self, session: int, copies: Sequence[CopyRecord], ready_s: Mapping[int, float]) -> None:
        """The copies of a hand-over: its groups, computed at `ready_s`, crossed a link one after another."""
        # Groups that were computed before the grant waited for that, not for the link.
        granted_s = min((copy.submitted_s for copy in copies), default=0.0)
        crossed = []
        for chunk in {copy.chunk for copy in copies}:
            chunk_copies = [copy for copy in copies if copy.chunk == chunk]
            submitted_s = min(copy.submitted_s for copy in chunk_copies)
            computed_s = max(granted_s, min(submitted_s, ready_s.get(chunk, submitted_s)))
            ended_s = max(copy.ended_s for copy in chunk_copies)
            crossed.append((ended_s, computed_s, sum(copy.num_bytes for copy in chunk_copies)))
        with self._lock:
            self._num_open = max(0, self._num_open - 1)
            if crossed:
                self._unfitted.setdefault(session, []).extend(crossed)
            if not self._num_open or sum(map(len, self._unfitted.values())) >= UNFITTED_MAX:
                self._fit()

    def late(self, num_rows: int, num_prompts: int) -> float:
        """By how much later than predicted hand-overs of such steps were with groups than without."""
        size = _bucket(num_rows), _bucket(num_prompts)
        grouped, whole = self._late.get((*size, True)), self._late.get((*size, False))
        return (grouped or _untried(whole)) / (whole or _untried(grouped))

    def add_plan(self, step: PlannedStep) -> None:
        """A step was planned: what is known of the other way fades."""
        size = _bucket(step.num_rows), _bucket(step.num_prompts)
        with self._lock:
            if (other := self._late.get((*size, not step.is_grouped))) is not None:
                untried = _untried(self._late.get((*size, step.is_grouped)))
                self._late[*size, not step.is_grouped] = other + LATE_DECAY * (untried - other)

    def add_outcome(self, step: PlannedStep, ended_s: float) -> None:
        """A prompt of the step has arrived."""
        if step.completion_s <= 0.0:
            return
        ratio = (ended_s - step.begun_s) / step.completion_s
        size = _bucket(step.num_rows), _bucket(step.num_prompts), step.is_grouped
        with self._lock:
            before = self._late.get(size, 1.0)
            self._late[size] = _mean(before, min(max(ratio, before / LATE_STEP), before * LATE_STEP))

    def _fit(self) -> None:
        """Fits the links by what crossed them since the last time, hand-overs that shared one together.

        `add_copies` calls it when no hand-over is under way, or when much has crossed: between those that are
        known, while others are under way, the link seems to stand still. It is not for the thread that
        launches a step: the step's own hand-overs are under way when its groups are chosen.
        """
        for session, crossed in self._unfitted.items():
            groups: list[tuple[int, float, bool]] = []
            free_s = -inf
            for ended_s, computed_s, num_bytes in sorted(crossed):
                start_s, was_idle = max(free_s, computed_s), computed_s >= free_s
                free_s = max(free_s, ended_s)
                if free_s > start_s:
                    groups.append((num_bytes, free_s - start_s, was_idle))
            if groups:
                link = self._links.pop(session, None) or LinkModel()
                link.add(groups)
                self._links[session] = link
        self._unfitted.clear()
        while len(self._links) > NUM_LINKS_MAX:
            del self._links[next(iter(self._links))]

    def step(self, num_rows: int) -> StepTiming:
        """The predicted time of a step of so many rows."""
        if not self._steps:
            return StepTiming(LAYER_S_DEFAULT, 0.0, SPREAD_DEFAULT, least_s=LAYER_S_DEFAULT)
        bucket, num_rows = _bucket(num_rows), max(1, num_rows)
        nearest = self._steps[min(self._steps, key=lambda known: abs(known - bucket))]
        layer_s = nearest.layer_s * num_rows
        rest_s = min(layer_s, nearest.rest_s * num_rows)
        return replace(nearest, layer_s=layer_s, rest_s=rest_s, least_s=nearest.least_s * num_rows)

    def link(self, session: int) -> tuple[float, float]:
        """Overhead per group and seconds per byte of a session's link; of the last one for a new session."""
        with self._lock:
            if not self._links:
                return OVERHEAD_S_DEFAULT, 1 / BYTES_PER_S_DEFAULT
            link = self._links.get(session) or next(reversed(self._links.values()))
            return link.overhead_s, link.byte_s

    def predict(
        self,
        num_layers: int,
        num_rows: int,
        layer_bytes: Mapping[int, int | Ints],
        lead_s: float = 0.0,
        num_prompts: Mapping[int, int] | None = None,
        busy_s: float = 0.0,
    ) -> StepPrediction:
        """A step, given the bytes that each session gets from a layer, or from each of the layers.

        What goes to several sessions leaves by one port, one after the other. `num_prompts`, by session,
        leave in the step, each in its own groups; without it one for each session.
        """
        counts = num_prompts or dict.fromkeys(layer_bytes, 1)
        step, transfer_s, overhead_s = self.step(num_rows), np.zeros(num_layers), 0.0
        for session, num_bytes in layer_bytes.items():
            link_overhead_s, byte_s = self.link(session)
            transfer_s += np.asarray(num_bytes) * byte_s
            overhead_s += link_overhead_s * counts[session]
        group_s = GROUP_COST * overhead_s if step.group_s is None else step.group_s * sum(counts.values())
        return StepPrediction(
            layer_s=step.layer_s,
            rest_s=step.rest_s,
            transfer_s=tuple(transfer_s.tolist()),
            overhead_s=overhead_s,
            group_s=group_s,
            spread=step.spread,
            lead_s=lead_s,
            busy_s=busy_s,
        )


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """How many bytes each layer of a rank has to hand over: states and windows make layers differ."""

    components: tuple[tuple[Extent, Ints], ...]
    """The extent of each component, and the bytes of one entry on each layer."""
    kinds: tuple[int, ...]
    """A number for each layer, the same for layers that keep the same."""

    @classmethod
    def of_rank(cls, spec: Spec, rank: int, layers: Range) -> LayerBytes:
        """Of the layers [layers) that a rank computes."""
        components: list[tuple[Extent, Ints]] = []
        for component in spec.cache.components:
            held = box(spec, component, rank, "this")
            num_units = held.units[1] - held.units[0]
            entry_bytes = np.zeros(layers[1] - layers[0], dtype=np.int64)
            held_layers = [layer - layers[0] for layer in to_ids(held.layers) if layer < layers[1]]
            entry_bytes[held_layers] = (
                num_units * component.num_elements * item_bytes(spec.storage.dtype_of(component))
            )
            components.append((component.extent, entry_bytes))
        kinds: dict[tuple[int, ...], int] = {}
        by_layer = zip(*(entry_bytes.tolist() for _, entry_bytes in components), strict=True)
        return cls(tuple(components), tuple(kinds.setdefault(kept, len(kinds)) for kept in by_layer))

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep the same."""
        return max(self.kinds, default=0) == 0

    def of_tokens(self, num_tokens: int, tokens: Range) -> tuple[Ints, Ints]:
        """By layer: all bytes of some tokens of a prompt, and those of states, which go with the last."""
        paged, states = np.zeros(len(self.kinds), dtype=np.int64), np.zeros(len(self.kinds), dtype=np.int64)
        for extent, entry_bytes in self.components:
            if extent.has_tokens:
                first, last = overlap(extent.wanted(num_tokens, 0), tokens) or (0, 0)
                paged += entry_bytes * (last - first)
            elif tokens[1] >= num_tokens:
                states += entry_bytes
        return paged + states, states


def _untried(other: float | None) -> float:
    """The lateness of what was not tried lately: none, or less where the other way is earlier than predicted.

    Else the way that is known would look better for ever wherever predictions are too late for both.
    """
    return 1.0 if other is None else min(1.0, other)


def _mean(before_s: float, new_s: float) -> float:
    return KEEP * before_s + (1 - KEEP) * new_s


def _bucket(num_rows: int) -> int:
    return int(log2(max(1, num_rows)))
