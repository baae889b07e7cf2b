"""The times of a request, and what a hand-over took: as figures and as a timeline.

queue        request in to the first step of its prompt
compute      from there to the end of the prompt's last layer
exposed      end of compute to the last byte in the target's pool
admission    last byte to admitted on the target
tth          request in to admitted; ttft: request in to the caller's first token
bound        the efficiency of one-layer groups without overhead: the bytes of a layer leave when the layer is
             computed and the link is free. A layer takes the link in proportion to its bytes, so that windows
             weigh what they hold, and a recurrent state weighs in the step that ends the prompt
transfer     time in which the busiest source rank had a copy under way. Where nothing was hidden (`off`) this
             is T, the serial transfer time; elsewhere it is no less than T
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.engine.commands import CopyRecord, LayerGroupTiming
from baton.observe import Interval, Timeline, Track, covered_s

REQUEST = "request"


@dataclass(slots=True)
class RequestTrace:
    """When things happened to a request, in seconds of the monotonic clock; 0 where they did not."""

    arrived_s: float
    begun_s: float = 0.0
    """Its first step was sent to the ranks, or its pages were reserved."""
    prompt_s: float = 0.0
    """The last layer of its prompt was computed."""
    token_s: float = 0.0
    """Its first token was sent to the caller."""
    settled_s: float = 0.0
    """The outcome of the hand-over arrived."""
    failure: str = ""
    """Why the hand-over failed or was aborted."""
    stepped_s: float = 0.0
    """Its first decode step completed."""
    ended_s: float = 0.0
    num_cached: int = 0
    num_held: int = 0
    groups: dict[int, list[LayerGroupTiming]] = field(default_factory=dict)
    """By rank: what was computed of the prompt."""
    copies: dict[int, list[CopyRecord]] = field(default_factory=dict)
    unpipelined: list[str] = field(default_factory=list)

    @property
    def is_handed_over(self) -> bool:
        """Whether the hand-over ended well."""
        return bool(self.settled_s) and not self.failure


@dataclass(frozen=True, slots=True)
class HandoffStages:
    """The stages of one request in seconds."""

    queue_s: float
    compute_s: float
    exposed_s: float
    admission_s: float
    ttft_s: float
    tth_s: float
    transfer_s: float
    num_bytes: int
    num_groups: int
    """Of the rank with the most groups."""


@dataclass(frozen=True, slots=True)
class HandoffTrace:
    """One request that was handed over: when it was submitted, when its first token came, and both traces."""

    asked_s: float
    first_s: float
    prefill: RequestTrace
    decode: RequestTrace

    def figures(self) -> HandoffStages:
        """The stages in seconds; the module docstring defines them."""
        trace, admitted_s = self.prefill, self.decode.settled_s
        copies, last_s = trace.copies, last_byte_s(trace)
        return HandoffStages(
            queue_s=trace.begun_s - self.asked_s,
            compute_s=trace.prompt_s - trace.begun_s,
            exposed_s=last_s - trace.prompt_s,
            admission_s=max(0.0, admitted_s - last_s),
            ttft_s=self.first_s - self.asked_s,
            tth_s=admitted_s - self.asked_s,
            transfer_s=max(serial_s(trace).values(), default=0.0),
            num_bytes=sum(copy.num_bytes for of_rank in copies.values() for copy in of_rank),
            num_groups=max((len(groups) for groups in trace.groups.values()), default=0),
        )

    def bound(self, serial_s: Mapping[int, float]) -> float:
        """The efficiency of one-layer groups without overhead, given the serial time of every source rank."""
        busiest_s = max(serial_s.values(), default=0.0)
        return 1 - self.least_exposed_s(serial_s) / busiest_s if busiest_s else 1.0

    def least_exposed_s(self, serial_s: Mapping[int, float], *, has_states: bool = True) -> float:
        """The exposed time of the bound; without states, as if there were none to send."""
        trace, last_s = self.prefill, self.prefill.prompt_s
        for rank, copies in trace.copies.items():
            dues = [due for copy in copies for due in copy.layers_ready]
            byte_s = serial_s.get(rank, 0.0) / max(1, sum(due.num_bytes for due in dues))
            left = [(due.ready_s, due.num_bytes - (0 if has_states else due.state_bytes)) for due in dues]
            last_s = max(last_s, across_s(left, byte_s, trace.begun_s))
        return last_s - trace.prompt_s

    def state_share(self) -> float:
        """The share of recurrent state in the bytes sent."""
        copies = (copy for copies in self.prefill.copies.values() for copy in copies)
        dues = [due for copy in copies for due in copy.layers_ready]
        return sum(due.state_bytes for due in dues) / max(1, sum(due.num_bytes for due in dues))

    def timeline(self, name: str) -> Timeline:
        """Queue, compute by group, copies by route, exposed transfer, admission, first decode step."""
        return Timeline(name, tuple(self._intervals()))

    def _intervals(self) -> Iterator[Interval]:
        zero_s, trace, decode = self.asked_s, self.prefill, self.decode
        reasons = "; ".join(dict.fromkeys(trace.unpipelined))
        details: dict[str, str | int] = {"cached tokens": trace.num_cached, "held tokens": decode.num_held}
        if reasons:
            details["not pipelined"] = reasons
        marks = (
            zero_s,
            trace.begun_s,
            trace.prompt_s,
            last_byte_s(trace),
            decode.settled_s,
            decode.stepped_s,
        )
        names = ("queue", "prefill", "exposed transfer", "admission", "first decode step")
        for label, start_s, stop_s in zip(names, marks, marks[1:], strict=False):
            if stop_s:
                begun_s = min(start_s, stop_s) - zero_s
                yield Interval(Track(REQUEST, label), label, begun_s, stop_s - zero_s, details)
        yield from rank_intervals(trace, zero_s, "source rank")


def rank_intervals(trace: RequestTrace, zero_s: float, name: str) -> Iterator[Interval]:
    """What the ranks computed and copied, in seconds since `zero_s`; a track is `name` and the rank."""
    for rank, groups in sorted(trace.groups.items()):
        for group in groups:
            label = f"layers {group.layers[0]}-{group.layers[1]}"
            start_s = max(0.0, group.start_s - zero_s)
            yield Interval(
                Track(f"{name} {rank}", "compute"), label, start_s, max(start_s, group.stop_s - zero_s)
            )
    for rank, copies in sorted(trace.copies.items()):
        for copy in copies:
            track = Track(f"{name} {rank}", f"copy to {copy.target_rank}")
            start_s = max(0.0, copy.submitted_s - zero_s)
            stop_s = max(start_s, copy.ended_s - zero_s)
            yield Interval(track, f"{rank} to {copy.target_rank}", start_s, stop_s, {"bytes": copy.num_bytes})


def last_byte_s(trace: RequestTrace) -> float:
    """When the last copy was done; the end of compute where that was later or nothing was copied."""
    ends = [copy.ended_s for copies in trace.copies.values() for copy in copies]
    return max([trace.prompt_s, *ends])


def serial_s(trace: RequestTrace) -> dict[int, float]:
    """By source rank: the time in which a copy was under way; T, if nothing was hidden."""
    return {
        rank: covered_s((copy.submitted_s, copy.ended_s) for copy in copies)
        for rank, copies in trace.copies.items()
        if copies
    }


def across_s(dues: Sequence[tuple[float, int]], byte_s: float, free_s: float) -> float:
    """When the last byte has crossed a link that sends each (ready_s, num_bytes) as soon as it can.

    The link is free from `free_s` on and takes `byte_s` for each byte.
    """
    for ready_s, num_bytes in sorted(dues):
        if num_bytes:
            free_s = max(free_s, ready_s) + num_bytes * byte_s
    return free_s
