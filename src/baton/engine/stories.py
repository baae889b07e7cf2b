"""What a hand-over took, from the stories of its two sides, as figures and as a timeline.

queue        request in to the first step of its prompt
compute      from there to the end of the prompt's last layer
exposed      end of compute to the last byte in the target's pool
admission    last byte to admitted on the target
tth          request in to admitted; ttft: request in to the caller's first token
transfer     time in which the busiest source rank had a copy under way; where nothing was hidden (`off`) this
             is T, the serial transfer time, and elsewhere no less than it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.engine.requests import Story
from baton.engine.steps import Group
from baton.observe import Interval, Timeline, Track, covered_s

REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Figures:
    """One request in seconds."""

    queue_s: float
    compute_s: float
    exposed_s: float
    admission_s: float
    ttft_s: float
    tth_s: float
    transfer_s: float
    num_bytes: int
    num_groups: int
    """Of the rank that was cut most."""


@dataclass(frozen=True, slots=True)
class Told:
    """One request that was handed over: when it was asked, had its first token, and its two stories."""

    asked_s: float
    first_s: float
    prefill: Story
    decode: Story

    @property
    def last_byte_s(self) -> float:
        """When the last copy was done; the end of compute where that was later or nothing was copied."""
        ends = [copy.ended_s for copies in self.prefill.copies.values() for copy in copies]
        return max([self.prefill.prompt_s, *ends])

    def figures(self) -> Figures:
        """The request in seconds; see the head of this file."""
        story, admitted_s = self.prefill, self.decode.settled_s
        copies = story.copies
        return Figures(
            queue_s=story.begun_s - self.asked_s,
            compute_s=story.prompt_s - story.begun_s,
            exposed_s=self.last_byte_s - story.prompt_s,
            admission_s=max(0.0, admitted_s - self.last_byte_s),
            ttft_s=self.first_s - self.asked_s,
            tth_s=admitted_s - self.asked_s,
            transfer_s=max(serial_s(self).values(), default=0.0),
            num_bytes=sum(copy.num_bytes for of_rank in copies.values() for copy in of_rank),
            num_groups=max((len(groups) for groups in story.groups.values()), default=0),
        )

    def layer_ends_s(self) -> dict[int, list[float]]:
        """By rank: when each layer of the prompt was computed, in order; layers of a group share its time."""
        return {rank: list(_layer_ends(groups)) for rank, groups in self.prefill.groups.items()}

    def bound(self, serial_s: dict[int, float]) -> float:
        """The efficiency of one-layer groups without overhead, given the serial time of every source rank."""
        last_s = self.prefill.prompt_s
        for rank, ends in self.layer_ends_s().items():
            total_s, finish_s = serial_s.get(rank, 0.0), 0.0
            for ready_s in ends if total_s else ():
                finish_s = max(finish_s, ready_s) + total_s / len(ends)
            last_s = max(last_s, finish_s)
        busiest_s = max(serial_s.values(), default=0.0)
        return 1 - (last_s - self.prefill.prompt_s) / busiest_s if busiest_s else 1.0

    def timeline(self, name: str) -> Timeline:
        """Queue, compute by group, copies by route, exposed transfer, admission, first decode step."""
        return Timeline(name, tuple(self._intervals()))

    def _intervals(self) -> Iterator[Interval]:
        zero_s, story, decode = self.asked_s, self.prefill, self.decode
        reasons = "; ".join(dict.fromkeys(story.unpipelined))
        details: dict[str, str | int] = {"cached tokens": story.num_cached, "held tokens": decode.num_held}
        if reasons:
            details["not pipelined"] = reasons
        marks = (zero_s, story.begun_s, story.prompt_s, self.last_byte_s, decode.settled_s, decode.stepped_s)
        names = ("queue", "prefill", "exposed transfer", "admission", "first decode step")
        for label, start_s, stop_s in zip(names, marks, marks[1:], strict=False):
            if stop_s:
                begun_s = min(start_s, stop_s) - zero_s
                yield Interval(Track(REQUEST, label), label, begun_s, stop_s - zero_s, details)
        for rank, groups in sorted(story.groups.items()):
            for group in groups:
                label = f"layers {group.layers[0]}-{group.layers[1]}"
                track = Track(f"source rank {rank}", "compute")
                yield Interval(track, label, max(0.0, group.start_s - zero_s), group.stop_s - zero_s)
        for rank, copies in sorted(story.copies.items()):
            for copy in copies:
                label = f"{rank} to {copy.target_rank}"
                track = Track(f"source rank {rank}", f"copy to {copy.target_rank}")
                start_s = max(0.0, copy.submitted_s - zero_s)
                yield Interval(track, label, start_s, copy.ended_s - zero_s, {"bytes": copy.num_bytes})


def serial_s(told: Told) -> dict[int, float]:
    """By source rank: the time in which a copy was under way; of a hand-over with nothing hidden, T."""
    return {
        rank: covered_s((copy.submitted_s, copy.ended_s) for copy in copies)
        for rank, copies in told.prefill.copies.items()
        if copies
    }


def _layer_ends(groups: list[Group]) -> Iterator[float]:
    for group in groups:
        num_layers = group.layers[1] - group.layers[0]
        for index in range(1, num_layers + 1):
            yield group.start_s + (group.stop_s - group.start_s) * index / num_layers
