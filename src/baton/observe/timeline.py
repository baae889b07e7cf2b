"""A request's timeline: named intervals on tracks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Detail: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """A row of the timeline: a group, such as a rank, and what it does."""

    group: str
    name: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A named span of time, in seconds on the timeline's clock."""

    track: Track
    name: str
    start_s: float
    stop_s: float
    details: Mapping[str, Detail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.start_s <= self.stop_s:
            raise ValueError(f"interval {self.name!r} ends at {self.stop_s}, before its start {self.start_s}")

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """The intervals of one request; tracks keep the order in which they first occur."""

    name: str
    intervals: tuple[Interval, ...] = ()

    @property
    def tracks(self) -> tuple[Track, ...]:
        """Every track that has an interval, those of a group together."""
        found = list(dict.fromkeys(interval.track for interval in self.intervals))
        groups = {group: index for index, group in enumerate(dict.fromkeys(track.group for track in found))}
        return tuple(sorted(found, key=lambda track: groups[track.group]))

    def on(self, track: Track) -> list[Interval]:
        """The intervals of a track, by start."""
        return sorted((each for each in self.intervals if each.track == track), key=lambda i: i.start_s)

    def lanes(self, track: Track) -> list[list[Interval]]:
        """The intervals of a track on as few lanes as possible, without overlap on a lane."""
        lanes: list[list[Interval]] = []
        free: list[tuple[float, int]] = []
        for interval in self.on(track):
            if free and free[0][0] <= interval.start_s:
                _, lane = heapq.heappop(free)
                lanes[lane].append(interval)
            else:
                lane = len(lanes)
                lanes.append([interval])
            heapq.heappush(free, (interval.stop_s, lane))
        return lanes

    @property
    def start_s(self) -> float:
        """When the first interval starts; 0 without intervals."""
        return min((each.start_s for each in self.intervals), default=0.0)

    @property
    def stop_s(self) -> float:
        """When the last interval ends; 0 without intervals."""
        return max((each.stop_s for each in self.intervals), default=0.0)


def covered_s(pieces: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, stop) intervals."""
    return sum(stop - start for start, stop in merged(pieces))


def merged(pieces: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of (start, stop) intervals, as disjoint intervals in order."""
    ordered = sorted(pieces)
    if not ordered:
        return
    begun, ended = ordered[0]
    for start, stop in ordered[1:]:
        if start > ended:
            yield begun, ended
            begun = start
        ended = max(ended, stop)
    yield begun, ended
