"""Hands a step over in groups of layers, while later layers are computed.

The pipeline hooks into the forward. `layer_done` closes a group where the planner ends one, and offers the
groups that are computed to the connector. The forward never waits for a copy.

On a GPU the host launches layers ahead of what is computed. The threads that bind and submit a group share
the interpreter with the launching thread, and they hold each other up: every call of torch releases the
interpreter and has it back before another thread is awake. So on a device

- hand-overs begin once the first layers of the step are launched, and the launching thread waits for the
  grants only as long as the device has enough to compute,
- where the link has enough time after the last launch, or nearly, nothing is planned or offered before,
- otherwise a group is offered when it is computed: nothing could be copied earlier.

Where the endpoint runs in a process of its own, only the grants are waited for: a group is offered as soon as
it is launched, with a fence.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from time import monotonic, process_time, thread_time
from typing import Any, Protocol

import torch

from baton.engine.commands import LayerGroupTiming, LayerReady, ScheduledBatch
from baton.engine.connector import KVConnector, PromptSlice
from baton.engine.cost_model import (
    CostModel,
    GroupPlanner,
    LayerBytes,
    PlannedStep,
    StepPrediction,
    StepTiming,
)
from baton.plan.overlap import Groups, completion_s, why_whole
from baton.plan.ranges import Range
from baton.plan.tokens import Ints
from baton.transport import NOW, CudaFence, Fence

HEAD_LAYERS = 4
"""Layers launched on a device before hand-overs begin: what follows takes the host two or three milliseconds,
in which the device computes these. Measured on an H200: with 4 instead of 0, 4K tokens were slowed down by
0.2 to 1.6 % instead of 1.4 to 2.1 %."""
SPARE_S = 0.002
"""The work that the device is to have left when the launching thread stops waiting for grants."""
GRANT_S_MAX = 0.008
LINK_MARGIN, LINK_MARGIN_S = 1.15, 0.001
"""A transfer is expected to take so many times its prediction, and so much longer, before it may wait for the
last launch. On an H200 with a smaller margin, 1K tokens at 12.5 GB/s exposed nearly everything 4 times in
10."""
HURRY_PART = 0.1
"""Groups that leave while layers are launched slow the launching down by at least this part: 10 to 50 % at 1K
tokens on an H200. A link that would be late by less waits too."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the order of this rank's computations."""

    fence: Fence = NOW
    """Ready when everything before the mark is computed."""
    at_s: float = 0.0
    """When it was passed, where that is known when it is made."""


class LayerClock(Protocol):
    """Makes marks, and knows later when they were passed."""

    @property
    def is_async(self) -> bool:
        """Whether the host launches work ahead of the device: marks are passed after they are made."""

    def mark(self) -> Mark:
        """A mark after everything launched so far."""

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """When the marks were passed, on the machine's monotonic clock; waits for the last one."""


class HostClock:
    """Computing is done when the call returns."""

    is_async = False

    def mark(self) -> Mark:
        return Mark(at_s=monotonic())

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        return [mark.at_s for mark in marks]


class CudaClock:
    """CUDA events, tied to the host's clock by one more event each time they are read.

    The two clocks drift apart by a millisecond within a minute or so, and elapsed times are single-precision
    numbers, so an event is read by its distance to one that has just passed.
    """

    is_async = True

    def __init__(self) -> None:
        self._now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        # Blocking: a thread of each copy waits for it, and would keep a core busy otherwise.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(CudaFence(event))

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """By the device's own clock, backwards from now; the stream has to be idle but for the marks."""
        events: list[Any] = [mark.fence.event for mark in marks if isinstance(mark.fence, CudaFence)]
        if not events:
            return []
        events[-1].synchronize()
        start_s = monotonic()
        self._now.record()
        self._now.synchronize()
        now_s = (start_s + monotonic()) / 2
        return [now_s - event.elapsed_time(self._now) / 1e3 for event in events]


def clock_of(device: torch.device) -> LayerClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """A group of layers of one prompt; it can be read after the mark."""

    part: PromptSlice
    layers: Range
    mark_index: int


@dataclass(slots=True)
class Forward:
    """The state of the step under way."""

    num_rows: int = 0
    slices: list[PromptSlice] = field(default_factory=list)
    """The prompts that it hands over."""
    marks: list[Mark] = field(default_factory=list)
    """At its begin, after the last layer of each group, at its end, and after each draft layer."""
    stored: list[Mark] = field(default_factory=list)
    """After each layer, where layers differ and a prompt is handed over."""
    head: list[Mark] = field(default_factory=list)
    """After each layer that was launched before the groups were planned."""
    group_starts: dict[int, int] | None = None
    """The first layer of each group by its last; None until they are planned."""
    pending: deque[GroupOffer] = field(default_factory=deque)
    offered: list[tuple[GroupOffer, int]] = field(default_factory=list)
    """With the index of the chunk."""
    has_begun_transfers: bool = False
    slack_s: float = 0.0
    """How long the link may wait, from the begin of the forward on."""
    begun_s: float = field(default_factory=monotonic)
    head_begun_s: float = 0.0
    """When the first layer was launched, shifted by what the host waited for grants since."""
    launched_s: float = inf
    other_threads_s: float = field(default_factory=lambda: process_time() - thread_time())
    """Processor time of other threads: before the forward, then, at its end, while it lasted."""
    num_early: int = 0
    """Offers before the last layer was launched: groups of layers, of each prompt."""
    offering_s: float = 0.0
    """What they took the thread that launches."""

    def end(self) -> None:
        """The host has launched the last layer."""
        self.launched_s = monotonic()
        self.other_threads_s = process_time() - thread_time() - self.other_threads_s
        self.num_early = len(self.offered)

    def group_s(self, late_s: float, *, is_offloaded: bool) -> float | None:
        """What an offer took from the forward: nothing if the device still computed at `late_s`, long after
        the launch; None if none was made during it.

        What other threads do counts where they bind and copy. Where another process does that, they do
        little, however many groups there are.
        """
        if not self.num_early:
            return None
        if self.launched_s < late_s:
            return 0.0
        return (self.offering_s + (0.0 if is_offloaded else self.other_threads_s)) / self.num_early


class LayerPipeline:
    """The hooks of a rank's forward."""

    def __init__(
        self,
        connector: KVConnector,
        costs: CostModel,
        clock: LayerClock,
        layers: Range,
        layer_bytes: LayerBytes,
        *,
        policy: str,
        is_offloaded: bool = False,
    ) -> None:
        self._connector = connector
        self._costs = costs
        self._clock = clock
        self._layers = layers
        """Of the model; the draft layers, on the last stage, follow them."""
        self._layer_bytes = layer_bytes
        self._policy = policy
        self._has_to_wait = clock.is_async and not is_offloaded
        """Whether offers hold up the thread that launches; not where another process does the work."""
        self._planner = GroupPlanner()
        self._link_free_s = 0.0
        """When the link should be done with the steps before."""
        self._forward = Forward()
        self.unpipelined = ""
        """Why the last step was not split into groups, where it was not."""

    @property
    def slices(self) -> Sequence[PromptSlice]:
        """The prompts that the last step handed over."""
        return self._forward.slices

    def before_forward(self, batch: ScheduledBatch) -> None:
        """Finds the prompts that are handed over in this step."""
        slices = self._connector.slices(batch.sequences)
        self._forward = Forward(batch.num_rows, slices, [self._clock.mark()])

    def layer_done(self, layer: int) -> None:
        """Offers the groups that are computed; a draft layer, after sampling, is a group of its own."""
        forward = self._forward
        if layer >= self._layers[1]:
            forward.marks.append(self._clock.mark())
            for part in forward.slices:
                self._add_offer(part, (layer, layer + 1))
            self._offer(is_last=True)
            return
        if forward.slices and not self._layer_bytes.is_uniform:
            forward.stored.append(self._clock.mark())
        if forward.group_starts is None:
            if self._is_planned_later(layer):
                forward.head_begun_s = forward.head_begun_s or monotonic()
                forward.head.append(self._clock.mark())
                return
            self._plan()
        self._close_group(layer)
        self._offer()

    def after_forward(self) -> None:
        """The layers of this rank are launched; tokens are not sampled yet."""
        self._forward.end()
        if self._forward.group_starts is None:
            self._plan()
        self._forward.marks.append(self._clock.mark())
        self._offer(is_last=True)

    def finish(self) -> list[LayerGroupTiming]:
        """Waits until the step is computed, learns from it, and returns when its groups were."""
        forward = self._forward
        all_times_s = self._clock.times_s([*forward.stored, *forward.marks])
        stored_s, marks_s = all_times_s[: len(forward.stored)], all_times_s[len(forward.stored) :]
        for offer, chunk in forward.offered:
            offer.part.transfer.ready_s[chunk] = marks_s[offer.mark_index]
        group_starts = forward.group_starts or {}
        num_groups = len(group_starts)
        if len(marks_s) < num_groups + 2:
            return []  # a rank without layers
        begun_s, *group_ends_s, last_stored_s, end_s = marks_s[: num_groups + 2]
        # The last group lasts until the end of the forward, beyond the time when its layers were stored.
        bounds_s = pairwise([begun_s, *group_ends_s, end_s])
        groups = [
            LayerGroupTiming((start, last + 1), *times_s)
            for (last, start), times_s in zip(group_starts.items(), bounds_s, strict=True)
        ]
        layer_s = (end_s - begun_s) / (self._layers[1] - self._layers[0])
        group_s = None
        if self._clock.is_async:
            group_s = forward.group_s(end_s - layer_s, is_offloaded=not self._has_to_wait)
        timing = StepTiming(layer_s, end_s - last_stored_s, group_s=group_s)
        self._costs.add_step(forward.num_rows, timing, num_groups=num_groups if forward.slices else 0)
        weights = layer_weights(stored_s, self._layer_bytes.kinds) if stored_s else None
        ends_s = layer_ends_s(groups, weights)
        for offer, chunk in forward.offered:
            if offer.layers[0] < self._layers[1]:  # a draft layer is ready as a whole
                offer.part.transfer.layers_ready[chunk] = partial(self._layers_ready, offer, ends_s)
        first_draft = self._layers[1]
        drafts = [
            LayerGroupTiming((first_draft + index, first_draft + index + 1), *times_s)
            for index, times_s in enumerate(pairwise(marks_s[num_groups + 1 :]))
        ]
        return [*groups, *drafts]

    def _layers_ready(self, offer: GroupOffer, ends_s: Sequence[float]) -> list[LayerReady]:
        part = offer.part
        total, states = self._layer_bytes.of_tokens(part.transfer.command.num_tokens, part.tokens)
        return [
            LayerReady(ends_s[index], int(total[index]), int(states[index]))
            for index in range(offer.layers[0] - self._layers[0], offer.layers[1] - self._layers[0])
            if total[index]
        ]

    def _offer(self, *, is_last: bool = False) -> None:
        """Offers the groups that can be copied by now; at the end of the launch all, to be copied later."""
        forward, begun_s = self._forward, monotonic()
        is_all = is_last or not self._has_to_wait
        while forward.pending:
            offer = forward.pending[0]
            fence = forward.marks[offer.mark_index].fence
            if not is_all and not fence.is_ready():
                break
            forward.pending.popleft()
            chunk = self._connector.offer(offer.part, offer.layers, fence)
            if chunk is not None:
                forward.offered.append((offer, chunk))
        if not is_last:
            forward.offering_s += monotonic() - begun_s

    def _close_group(self, layer: int, mark: Mark | None = None) -> None:
        """Ends a group with this layer, if the plan does; `mark` where the layer was launched before."""
        forward = self._forward
        start = (forward.group_starts or {}).get(layer)
        if start is None:
            return
        forward.marks.append(mark or self._clock.mark())
        for part in forward.slices:
            if part.transfer.command.is_pipelined:
                self._add_offer(part, (start, layer + 1))
            elif layer + 1 == self._layers[1]:
                self._add_offer(part, self._layers)

    def _add_offer(self, part: PromptSlice, layers: Range) -> None:
        self._forward.pending.append(GroupOffer(part, layers, len(self._forward.marks) - 1))

    def _is_planned_later(self, layer: int) -> bool:
        """Whether to go on launching: the first layers always, the others while the link can wait."""
        forward = self._forward
        if not self._clock.is_async or not forward.slices:
            return False
        if layer < min(self._layers[0] + HEAD_LAYERS, self._layers[1] - 1):
            return True
        self._begin_transfers()
        if not forward.head or not self._has_to_wait:
            return False
        # Whether the link can wait for the last launch, if launching goes on at the speed so far.
        now_s, num_launched = monotonic(), len(forward.head)
        num_left = self._layers[1] - self._layers[0] - num_launched - 1
        left_s = (now_s - forward.head_begun_s) / num_launched * num_left
        return (now_s + left_s - forward.begun_s) * (1 - HURRY_PART) < forward.slack_s

    def _begin_transfers(self) -> None:
        """Begins the step's hand-overs, once; waits for grants while the device computes the first layers."""
        forward = self._forward
        if forward.has_begun_transfers or not forward.slices:
            return
        forward.has_begun_transfers = True
        for part in forward.slices:
            self._connector.begin(part.transfer)
        if not self._clock.is_async:
            return
        wait_begun_s = monotonic()
        head_s = len(forward.head) * self._costs.step(forward.num_rows).layer_s
        limit_s = forward.begun_s + min(head_s - SPARE_S, GRANT_S_MAX)
        for part in forward.slices:
            if (left_s := limit_s - monotonic()) > 0.0 and part.transfer.command.is_pipelined:
                part.transfer.answered.wait(left_s)
        forward.head_begun_s += monotonic() - wait_begun_s
        forward.slack_s = self._slack_s()

    def _slack_s(self) -> float:
        """How long the link can wait, from the begin of the forward on, and be done at its end."""
        prediction = self._predict([part for part in self.slices if part.transfer.command.is_pipelined])
        least_s = self._costs.step(self._forward.num_rows).least_s
        compute_s = least_s * len(prediction.transfer_s) - prediction.rest_s
        return compute_s - LINK_MARGIN * sum(prediction.transfer_s) - LINK_MARGIN_S

    def _plan(self) -> None:
        """Chooses the groups of the step, and closes those whose layers were launched before."""
        forward, first = self._forward, self._layers[0]
        self._begin_transfers()
        forward.group_starts = {first + stop - 1: first + start for start, stop in self._choose_groups()}
        for layer, mark in enumerate(forward.head, first):
            self._close_group(layer, mark)

    def _choose_groups(self) -> Groups:
        num_layers, self.unpipelined = self._layers[1] - self._layers[0], ""
        whole = ((0, num_layers),)
        if not self.slices:
            return whole
        pipelined = [part for part in self.slices if part.transfer.command.is_pipelined]
        if not pipelined:
            self.unpipelined = "the request switched it off"
            return whole
        # The layers of a step are grouped once for all prompts in it, by the policy of the first one.
        policy = pipelined[0].transfer.command.policy or self._policy
        # On a device, what is computed by now can leave now, and not sooner.
        lead_s = monotonic() - self._forward.begun_s if self._clock.is_async else 0.0
        # Policies judge whole prompts, of which this step may compute a chunk.
        num_tokens = sum(part.transfer.command.num_tokens for part in pipelined) // len(pipelined)
        prediction = self._predict(pipelined, lead_s)
        num_rows, begun_s = self._forward.num_rows, self._forward.begun_s
        late = self._costs.late(num_rows, len(pipelined))
        groups = self._planner.plan(policy, prediction, num_tokens, late)
        all_s = completion_s(prediction.layer_times(), groups)
        self._link_free_s = begun_s + all_s
        planned = PlannedStep(num_rows, len(pipelined), len(groups) > 1, begun_s, all_s)
        self._costs.add_plan(planned)
        for part in pipelined:
            part.transfer.planned = planned
        if len(groups) == 1:
            self.unpipelined = f"{policy}: {why_whole(policy, num_layers, num_tokens)}"
        return groups

    def _predict(self, slices: Sequence[PromptSlice], lead_s: float = 0.0) -> StepPrediction:
        layer_bytes: dict[int, int | Ints] = {}
        num_prompts = Counter[int]()
        for part in slices:
            session = part.transfer.session
            num_bytes, _ = self._layer_bytes.of_tokens(part.transfer.command.num_tokens, part.tokens)
            layer_bytes[session] = layer_bytes.get(session, 0) + num_bytes
            num_prompts[session] += 1
        num_layers = self._layers[1] - self._layers[0]
        return self._costs.predict(
            num_layers, self._forward.num_rows, layer_bytes, lead_s, num_prompts, self._busy_s()
        )

    def _busy_s(self) -> float:
        """How long the link will be busy with the steps before, from the begin of this forward on.

        As predicted, or as much as the oldest of their prompts is late.
        """
        begun_s = self._forward.begun_s
        behind_s = self._connector.behind_s(begun_s)
        return 0.0 if behind_s is None else max(0.0, behind_s, self._link_free_s - begun_s)


def layer_weights(stored_s: Sequence[float], kinds: Sequence[int]) -> tuple[float, ...]:
    """By layer: the time that its kind takes, over the average; `stored_s` has the time of each layer.

    A layer's time is that from the moment when the layer before has stored its tokens to the moment when this
    one has: the rest of the layer before, which all layers have, and this layer's own mixer.
    """
    spans_s: dict[int, list[float]] = {}
    # The time of the first layer is not known: nothing is before it.
    for (before_s, after_s), kind in zip(pairwise(stored_s), kinds[1:], strict=True):
        spans_s.setdefault(kind, []).append(after_s - before_s)
    total_s = stored_s[-1] - stored_s[0]
    if total_s <= 0.0:
        return (1.0,) * len(kinds)
    average_s = total_s / (len(kinds) - 1)
    kind_s = {kind: sum(spans) / len(spans) for kind, spans in spans_s.items()}
    layers_s = [kind_s.get(kind, average_s) for kind in kinds]
    return tuple(seconds * len(kinds) / sum(layers_s) for seconds in layers_s)


def layer_ends_s(groups: Sequence[LayerGroupTiming], weights: Sequence[float] | None) -> list[float]:
    """By layer: when it was computed, if the layers of a group share its time by weight, or evenly."""
    ends_s, first = [], groups[0].layers[0]
    weights = weights or (1.0,) * (groups[-1].layers[1] - first)
    for group in groups:
        group_weights = weights[group.layers[0] - first : group.layers[1] - first]
        done = 0.0
        for weight in group_weights:
            done += weight
            ends_s.append(group.start_s + (group.stop_s - group.start_s) * done / sum(group_weights))
    return ends_s
