"""The forward's hooks that hand a step over in groups of layers while later layers are computed.

The threads that bind and submit a group share the interpreter with the one that launches layers, which on a
GPU is ahead of what is computed. They hold each other up: every call of torch lets the interpreter go, and
has it back before another thread is awake. So on a device

- hand-overs are begun when the step's first layers are launched, and their grants are waited for as long as
  the device has enough to compute,
- where the link will have time enough when all layers are launched, or nearly, nothing is cut or offered
  before,
- else a group is offered when it is computed: earlier nothing could be copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from time import monotonic, process_time, thread_time

from baton.engine.rank.clock import Clock, Mark
from baton.engine.rank.cutting import Cuts
from baton.engine.rank.handing import Handing, Part
from baton.engine.rank.layer_bytes import LayerBytes
from baton.engine.rank.pace import Took
from baton.engine.rank.readiness import ends_of, shares_of
from baton.engine.steps import Batch, Due, Group
from baton.plan.overlap import Groups, LayerTimes
from baton.plan.ranges import Range
from baton.plan.tokens import Ints

OFF = "off"
HEAD_LAYERS = 4
"""Layers that are launched on a device before hand-overs are begun and the step is cut: what follows takes
the host two or three milliseconds, in which the device has these to compute."""
SPARE_S = 0.002
"""What the device is to have before it when the host goes on."""
LINK_PART, LINK_S = 1.15, 0.001
"""A transfer is expected to take so many times what is predicted, and so much longer."""
HURRY_PART = 0.1
"""What launching is expected to take longer by, at the least, where groups leave meanwhile."""
GRANT_S_MAX = 0.008


@dataclass(slots=True)
class Forward:
    """The forward under way; others' is the time of other threads until it began, then while it lasted."""

    num_rows: int = 0
    begun_s: float = 0.0
    launched_s: float = inf
    others_s: float = 0.0

    @staticmethod
    def of(num_rows: int) -> Forward:
        """One that begins now."""
        return Forward(num_rows, monotonic(), others_s=process_time() - thread_time())

    def end(self) -> None:
        """The host is through with it."""
        self.launched_s = monotonic()
        self.others_s = process_time() - thread_time() - self.others_s

    def group_s(self, late_s: float, num_groups: int) -> float:
        """What a group took from it: nothing if the device was at work at `late_s`, long after the host."""
        return 0.0 if self.launched_s < late_s else self.others_s / num_groups


@dataclass(frozen=True, slots=True)
class Offer:
    """A group of layers of a prompt, and after which mark it can be read."""

    part: Part
    layers: Range
    mark: Mark
    number: int


class Offers:
    """The groups of one step on their way to the endpoint."""

    def __init__(self, handing: Handing) -> None:
        self._handing = handing
        self.head: list[Mark] = []
        """After each of the layers that are launched before the step is cut."""
        self.first_s = 0.0
        """When the first of them was launched, had nobody waited for grants since."""
        self.is_set_out = False
        self.slack_s = 0.0
        """For how long they may wait, from the begin of the forward on."""
        self._held: deque[Offer] = deque()
        self.given: list[tuple[Offer, int]] = []
        """With the numbers of their chunks."""

    def hold(self, offer: Offer) -> None:
        """These layers are launched."""
        self._held.append(offer)

    def give_computed(self) -> None:
        """Offers what can be copied by now."""
        while self._held and self._held[0].mark.fence.is_ready():
            self._give(self._held.popleft())

    def give_all(self) -> None:
        """Offers what is left, to be copied when it is computed."""
        while self._held:
            self._give(self._held.popleft())

    def _give(self, offer: Offer) -> None:
        chunk = self._handing.offer(offer.part, offer.layers, offer.mark.fence)
        if chunk is not None:
            self.given.append((offer, chunk))


class Pipeline:
    """Where this rank's layers are cut, step by step; the forward never waits for a copy."""

    def __init__(self, handing: Handing, clock: Clock, policy: str, layer_bytes: LayerBytes) -> None:
        self._handing = handing
        self._clock = clock
        self._policy = policy
        self._layer_bytes = layer_bytes
        self._cuts = Cuts()
        self._marks: list[Mark] = []
        self._stored: list[Mark] = []
        """After each layer, where they are unlike."""
        self._ends: dict[int, int] | None = None
        """First layers of groups by their last; None until the first layer is begun."""
        self.unpipelined = ""
        self._leaving: list[Part] = []
        self._offers = Offers(handing)
        self._forward = Forward()

    def before_forward(self, batch: Batch) -> None:
        """Finds the prompts that leave in this step."""
        self._leaving = self._handing.leaving(batch.works)
        self._ends = None
        self._offers, self._stored = Offers(self._handing), []
        self._marks = [self._clock.mark()]
        self._forward = Forward.of(batch.num_rows)

    def layer_done(self, layer: int) -> None:
        """Offers the group that ends with this layer; a draft's, after sampling, is a group of its own."""
        if layer >= self._layers[1]:
            self._marks.append(self._clock.mark())
            for part in self._leaving:
                self._hold(part, (layer, layer + 1))
            self._offers.give_all()
            return
        if self._leaving and not self._layer_bytes.is_alike:
            self._stored.append(self._clock.mark())
        if self._is_head(layer):
            self._offers.first_s = self._offers.first_s or monotonic()
            self._offers.head.append(self._clock.mark())
            return
        self._cut_head()
        self._end_layer(layer)
        self._offers.give_computed()

    def after_forward(self) -> None:
        """The layers of this rank are through; tokens are not sampled yet."""
        self._forward.end()
        self._cut_head()
        self._marks.append(self._clock.mark())
        self._offers.give_all()

    @property
    def _layers(self) -> Range:
        return self._handing.layers

    @property
    def leaving(self) -> Sequence[Part]:
        """The prompts of the step that leave."""
        return self._leaving

    def groups(self) -> list[Group]:
        """What was computed when, once it is."""
        every = self._clock.times_s([*self._stored, *self._marks])
        stored, times = every[: len(self._stored)], every[len(self._stored) :]
        for offer, chunk in self._offers.given:
            offer.part.outgoing.ready_s[chunk] = times[offer.number]
        ends = self._first_layers()
        num_marks = len(ends) + 2
        if len(times) < num_marks:
            return []  # a rank without layers
        drafts_s, first_draft = times[num_marks - 1 :], self._layers[1]
        drafts = [
            Group((first_draft + index, first_draft + index + 1), start, stop)
            for index, (start, stop) in enumerate(pairwise(drafts_s))
        ]
        *times, stored_s, end_s = times[:num_marks]
        spans = zip(ends.items(), times, [*times[1:], end_s], strict=True)
        groups = [Group((first, last + 1), start, stop) for (last, first), start, stop in spans]
        shares = shares_of(stored, self._layer_bytes.kinds) if stored else None
        layer_s = (end_s - times[0]) / (self._layers[1] - self._layers[0])
        is_known = self._clock.is_late and bool(self._leaving)
        group_s = self._forward.group_s(end_s - layer_s, len(groups)) if is_known else None
        took = Took(layer_s, end_s - stored_s, group_s=group_s)
        self._handing.pace.computed(self._forward.num_rows, took)
        self._note_dues(ends_of(groups, shares))
        return [*groups, *drafts]

    def _note_dues(self, ends_s: Sequence[float]) -> None:
        """What each layer of this step's chunks had to send and from when on it could, if somebody asks."""
        for offer, chunk in self._offers.given:
            if offer.layers[0] < self._layers[1]:  # a draft's is ready as a whole
                offer.part.outgoing.dues[chunk] = partial(self._dues, offer.part, offer.layers, ends_s)

    def _dues(self, part: Part, layers: Range, ends_s: Sequence[float]) -> list[Due]:
        step, first = (part.outgoing.order.num_tokens, part.tokens), self._layers[0]
        mine = slice(layers[0] - first, layers[1] - first)
        sent = self._layer_bytes.of_tokens(*step)[mine].tolist()
        states = self._layer_bytes.of_states(*step)[mine].tolist()
        dues = (Due(*due) for due in zip(ends_s[mine], sent, states, strict=True))
        return [due for due in dues if due.num_bytes]

    def _is_head(self, layer: int) -> bool:
        """Whether a layer is launched before the step is cut: the first ones, or all if the link can wait."""
        if not self._clock.is_late or not self._leaving or self._ends is not None:
            return False
        if layer < min(self._layers[0] + HEAD_LAYERS, self._layers[1] - 1):
            return True
        self._set_out()
        return self._can_wait()

    def _set_out(self) -> None:
        """Begins the step's hand-overs, once, when enough layers are launched."""
        if self._offers.is_set_out or not self._leaving:
            return
        self._offers.is_set_out = True
        for part in self._leaving:
            self._handing.begin(part.outgoing)
        start_s = monotonic()
        self._await_grants()
        self._offers.first_s += monotonic() - start_s
        if self._clock.is_late:
            self._offers.slack_s = self._slack_s()

    def _can_wait(self) -> bool:
        """Whether the link can wait until all layers are launched, if that goes on at the speed so far."""
        offers, num_launched, now_s = self._offers, len(self._offers.head), monotonic()
        if not num_launched:
            return False
        num_left = self._layers[1] - self._layers[0] - num_launched - 1
        launched_s = now_s + (now_s - offers.first_s) / num_launched * num_left - self._forward.begun_s
        return launched_s * (1 - HURRY_PART) < offers.slack_s

    def _slack_s(self) -> float:
        """How long the link can wait, from the begin of the forward on, and be through at its end."""
        times = self._times([part for part in self._leaving if part.outgoing.order.is_pipelined])
        took = self._handing.pace.compute(self._forward.num_rows)
        compute_s = took.least_s * times.num_layers - took.rest_s
        return compute_s - LINK_PART * sum(times.transfer_s) - LINK_S

    def _cut_head(self) -> None:
        """Cuts the step's layers, once, and holds the groups that were launched before."""
        if self._ends is None:
            self._set_out()
            self._first_layers()
            for layer, mark in enumerate(self._offers.head, self._layers[0]):
                self._end_layer(layer, mark)

    def _await_grants(self) -> None:
        """Sleeps until the target answered, but no longer than the device is busy with the first layers."""
        head_s = len(self._offers.head) * self._handing.pace.compute(self._forward.num_rows).layer_s
        limit_s = self._forward.begun_s + min(head_s - SPARE_S, GRANT_S_MAX)
        for part in self._leaving:
            if (left_s := limit_s - monotonic()) > 0.0 and part.outgoing.order.is_pipelined:
                part.outgoing.answered.wait(left_s)

    def _end_layer(self, layer: int, mark: Mark | None = None) -> None:
        """Holds the group that ends with a layer, if one does; `mark` where that was made before."""
        start = self._first_layers().get(layer)
        if start is None:
            return
        self._marks.append(mark or self._clock.mark())
        for part in self._leaving:
            if part.outgoing.order.is_pipelined:
                self._hold(part, (start, layer + 1))
            elif layer + 1 == self._layers[1]:
                self._hold(part, self._layers)

    def _hold(self, part: Part, layers: Range) -> None:
        """These layers are launched, up to the last mark."""
        self._offers.hold(Offer(part, layers, self._marks[-1], len(self._marks) - 1))

    def _first_layers(self) -> dict[int, int]:
        """By the last layer of a group its first; cut when it is first asked for, while a GPU is at work."""
        if self._ends is None:
            first = self._layers[0]
            self._ends = {first + stop - 1: first + start for start, stop in self._cut()}
        return self._ends

    def _cut(self) -> Groups:
        num_layers, self.unpipelined = self._layers[1] - self._layers[0], ""
        whole = ((0, num_layers),)
        if not self._leaving:
            return whole
        piped = [part for part in self._leaving if part.outgoing.order.is_pipelined]
        if not piped:
            self.unpipelined = "the request asked for none"
            return whole
        # The layers of a step are cut once for all prompts in it, as the first one asks.
        policy = piped[0].outgoing.order.policy or self._policy
        if policy == OFF:
            self.unpipelined = "the policy is off"
            return whole
        times = self._times(piped)
        average = sum(len(part.work.tokens) for part in piped) // len(piped)
        # What is computed by now can leave now, and not sooner.
        lead_s = monotonic() - self._forward.begun_s if self._clock.is_late else 0.0
        took = self._handing.pace.compute(self._forward.num_rows)
        groups = self._cuts.of(policy, times, average, replace(took, lead_s=lead_s))
        if len(groups) == 1:
            reason = "there is one layer" if num_layers == 1 else "one group is done soonest"
            self.unpipelined = f"{policy}: {reason}"
        return groups

    def _times(self, parts: Sequence[Part]) -> LayerTimes:
        """What this step is predicted to take."""
        layer_bytes: dict[int, Ints] = {}
        for part in parts:
            session = self._handing.session_of(part.outgoing)
            found = self._layer_bytes.of_tokens(part.outgoing.order.num_tokens, part.tokens)
            layer_bytes[session] = layer_bytes[session] + found if session in layer_bytes else found
        num_layers = self._layers[1] - self._layers[0]
        return self._handing.pace.times(num_layers, self._forward.num_rows, layer_bytes)
