"""What a hand-over took, from the stories of its two sides, as figures and as a timeline.

queue        request in to the first step of its prompt
compute      from there to the end of the prompt's last layer
exposed      end of compute to the last byte in the target's pool
admission    last byte to admitted on the target
tth          request in to admitted; ttft: request in to the caller's first token
bound        the efficiency of one-layer groups without overhead: what a layer has to send of a step's tokens
             leaves when it is computed and the link is free. A layer takes the link by its bytes, so that
             windows weigh what they hold, and a recurrent state weighs in the step that ends the prompt
transfer     time in which the busiest source rank had a copy under way; where nothing was hidden (`off`) this
             is T, the serial transfer time, and elsewhere no less than it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.engine.requests import Story
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

    def figures(self) -> Figures:
        """The request in seconds; see the head of this file."""
        story, admitted_s = self.prefill, self.decode.settled_s
        copies, last_s = story.copies, last_byte_s(story)
        return Figures(
            queue_s=story.begun_s - self.asked_s,
            compute_s=story.prompt_s - story.begun_s,
            exposed_s=last_s - story.prompt_s,
            admission_s=max(0.0, admitted_s - last_s),
            ttft_s=self.first_s - self.asked_s,
            tth_s=admitted_s - self.asked_s,
            transfer_s=max(serial_s(story).values(), default=0.0),
            num_bytes=sum(copy.num_bytes for of_rank in copies.values() for copy in of_rank),
            num_groups=max((len(groups) for groups in story.groups.values()), default=0),
        )

    def bound(self, serial_s: Mapping[int, float]) -> float:
        """The efficiency of one-layer groups without overhead, given the serial time of every source rank."""
        busiest_s = max(serial_s.values(), default=0.0)
        return 1 - self.least_exposed_s(serial_s) / busiest_s if busiest_s else 1.0

    def least_exposed_s(self, serial_s: Mapping[int, float], *, has_states: bool = True) -> float:
        """What the bound exposes; without states, what it would if there were none to send."""
        story, last_s = self.prefill, self.prefill.prompt_s
        for rank, copies in story.copies.items():
            dues = [due for copy in copies for due in copy.layers_ready]
            byte_s = serial_s.get(rank, 0.0) / max(1, sum(due.num_bytes for due in dues))
            left = [(due.ready_s, due.num_bytes - (0 if has_states else due.state_bytes)) for due in dues]
            last_s = max(last_s, across_s(left, byte_s, story.begun_s))
        return last_s - story.prompt_s

    def state_share(self) -> float:
        """How much of what was sent is recurrent state."""
        copies = (copy for copies in self.prefill.copies.values() for copy in copies)
        dues = [due for copy in copies for due in copy.layers_ready]
        return sum(due.state_bytes for due in dues) / max(1, sum(due.num_bytes for due in dues))

    def timeline(self, name: str) -> Timeline:
        """Queue, compute by group, copies by route, exposed transfer, admission, first decode step."""
        return Timeline(name, tuple(self._intervals()))

    def _intervals(self) -> Iterator[Interval]:
        zero_s, story, decode = self.asked_s, self.prefill, self.decode
        reasons = "; ".join(dict.fromkeys(story.unpipelined))
        details: dict[str, str | int] = {"cached tokens": story.num_cached, "held tokens": decode.num_held}
        if reasons:
            details["not pipelined"] = reasons
        marks = (
            zero_s,
            story.begun_s,
            story.prompt_s,
            last_byte_s(story),
            decode.settled_s,
            decode.stepped_s,
        )
        names = ("queue", "prefill", "exposed transfer", "admission", "first decode step")
        for label, start_s, stop_s in zip(names, marks, marks[1:], strict=False):
            if stop_s:
                begun_s = min(start_s, stop_s) - zero_s
                yield Interval(Track(REQUEST, label), label, begun_s, stop_s - zero_s, details)
        yield from rank_intervals(story, zero_s, "source rank")


def rank_intervals(story: Story, zero_s: float, name: str) -> Iterator[Interval]:
    """What the ranks computed and copied, in seconds from `zero_s` on; ranks are called by `name`."""
    for rank, groups in sorted(story.groups.items()):
        for group in groups:
            label = f"layers {group.layers[0]}-{group.layers[1]}"
            start_s = max(0.0, group.start_s - zero_s)
            yield Interval(
                Track(f"{name} {rank}", "compute"), label, start_s, max(start_s, group.stop_s - zero_s)
            )
    for rank, copies in sorted(story.copies.items()):
        for copy in copies:
            track = Track(f"{name} {rank}", f"copy to {copy.target_rank}")
            start_s = max(0.0, copy.submitted_s - zero_s)
            stop_s = max(start_s, copy.ended_s - zero_s)
            yield Interval(track, f"{rank} to {copy.target_rank}", start_s, stop_s, {"bytes": copy.num_bytes})


def last_byte_s(story: Story) -> float:
    """When the last copy was done; the end of compute where that was later or nothing was copied."""
    ends = [copy.ended_s for copies in story.copies.values() for copy in copies]
    return max([story.prompt_s, *ends])


def serial_s(story: Story) -> dict[int, float]:
    """By source rank: the time in which a copy was under way; of a hand-over with nothing hidden, T."""
    return {
        rank: covered_s((copy.submitted_s, copy.ended_s) for copy in copies)
        for rank, copies in story.copies.items()
        if copies
    }


def across_s(dues: Sequence[tuple[float, int]], byte_s: float, free_s: float) -> float:
    """When all is across, by (ready_s, num_bytes): in the order in which it is ready, the link never idle.

    The link is free from `free_s` on, and takes `byte_s` for a byte and nothing else.
    """
    for ready_s, num_bytes in sorted(dues):
        if num_bytes:
            free_s = max(free_s, ready_s) + num_bytes * byte_s
    return free_s
