"""The forward's hooks that hand a step over in groups of layers while later layers are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic, process_time, thread_time

from baton.engine.rank.clock import Clock, Mark
from baton.engine.rank.cutting import Cuts
from baton.engine.rank.handing import Handing, Part
from baton.engine.rank.layer_bytes import LayerBytes
from baton.engine.rank.pace import Took
from baton.engine.rank.readiness import ends_of, shares_of
from baton.engine.steps import Batch, Due, Group
from baton.plan.overlap import Groups
from baton.plan.ranges import Range
from baton.plan.tokens import Ints

OFF = "off"


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward under way: its rows, and the time of other threads until it began, or while it lasted."""

    num_rows: int = 0
    at_s: float = 0.0
    others_s: float = 0.0

    @staticmethod
    def of(num_rows: int) -> Forward:
        """One that begins now."""
        return Forward(num_rows, monotonic(), process_time() - thread_time())

    def ended(self) -> Forward:
        """The moment at which the host was through with it, and what others took meanwhile."""
        now = Forward.of(self.num_rows)
        return replace(now, others_s=now.others_s - self.others_s)

    def group_s(self, late_s: float, num_groups: int) -> float:
        """What a group took from it: nothing if the device was at work at `late_s`, long after the host."""
        return 0.0 if self.at_s < late_s else self.others_s / num_groups


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
        self._offered: list[tuple[Part, int, Range, int]] = []
        """Chunks of this step, with their layers and the mark after which they can be read."""
        self._forward = Forward()

    def before_forward(self, batch: Batch) -> None:
        """Finds the prompts that leave in this step."""
        self._leaving = self._handing.leaving(batch.works)
        self._ends = None
        self._offered, self._stored = [], []
        self._marks = [self._clock.mark()]
        self._forward = Forward.of(batch.num_rows)

    def layer_done(self, layer: int) -> None:
        """Offers the group that ends with this layer; a draft's, after sampling, is a group of its own."""
        if layer >= self._layers[1]:
            self._marks.append(self._clock.mark())
            for part in self._leaving:
                self._offer(part, (layer, layer + 1), self._marks[-1])
            return
        if self._leaving and not self._layer_bytes.is_alike:
            self._stored.append(self._clock.mark())
        start = self._first_layers().get(layer)
        if start is None:
            return
        mark = self._clock.mark()
        self._marks.append(mark)
        for part in self._leaving:
            if part.outgoing.order.is_pipelined:
                self._offer(part, (start, layer + 1), mark)
            elif layer + 1 == self._layers[1]:
                self._offer(part, self._layers, mark)

    def after_forward(self) -> None:
        """The layers of this rank are through; tokens are not sampled yet."""
        self._first_layers()
        self._marks.append(self._clock.mark())
        self._forward = self._forward.ended()

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
        for part, chunk, _, index in self._offered:
            part.outgoing.ready_s[chunk] = times[index]
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
        """What each layer of this step's chunks had to send, and from when on it could."""
        first, last = self._layers
        for part, chunk, layers, _ in self._offered:
            if layers[0] >= last:
                continue  # a draft's, which is ready as a whole
            step = (part.outgoing.order.num_tokens, part.tokens)
            sent, states = self._layer_bytes.of_tokens(*step), self._layer_bytes.of_states(*step)
            each = zip(ends_s, sent.tolist(), states.tolist(), strict=True)
            dues = [Due(*due) for due in each][layers[0] - first : layers[1] - first]
            part.outgoing.dues[chunk] = [due for due in dues if due.num_bytes]

    def _offer(self, part: Part, layers: tuple[int, int], mark: Mark) -> None:
        chunk = self._handing.offer(part, layers, mark.fence)
        if chunk is not None:
            self._offered.append((part, chunk, layers, len(self._marks) - 1))

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
        layer_bytes: dict[int, Ints] = {}
        for part in piped:
            session = self._handing.session_of(part.outgoing)
            found = self._layer_bytes.of_tokens(part.outgoing.order.num_tokens, part.tokens)
            layer_bytes[session] = layer_bytes[session] + found if session in layer_bytes else found
        times = self._handing.pace.times(num_layers, self._forward.num_rows, layer_bytes)
        average = sum(len(part.work.tokens) for part in piped) // len(piped)
        groups = self._cuts.of(policy, times, average, self._handing.pace.compute(self._forward.num_rows))
        if len(groups) == 1:
            reason = "there is one layer" if num_layers == 1 else "one group is done soonest"
            self.unpipelined = f"{policy}: {reason}"
        return groups
