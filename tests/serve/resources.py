"""What a deployment holds of its machine, and whether that grows.

Memory of a process rises while it warms up and then stays within a band, so growth is a slope: the line
through what was seen after the warm-up, over the time it was seen, has to stay below a bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.faults.stages import named_segments
from tests.serve.deployment import Deployment

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHM = "/dev/shm/"
_MEMFD = "/memfd:"


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds; memory is what it shares with nobody (anonymous and resident)."""

    memory_bytes: int
    num_fds: int
    num_segments: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a deployment at one time, by the name of its processes ("prefill-0", "prefill-0 rank 1")."""

    at_s: float
    held: Mapping[str, Held]
    pids: Mapping[str, int]
    pages: Mapping[str, Mapping[str, int]]
    segments: frozenset[str]
    """Shared memory that has a name, and would stay when its process is killed."""

    def total(self, what: str) -> int:
        """Over all processes."""
        return sum(getattr(each, what) for each in self.held.values())

    def lines(self) -> list[str]:
        """For people."""
        rows = [
            f"{name:<18} {each.memory_bytes / 2**20:7.1f} MiB {each.num_fds:4d} fds "
            f"{each.num_segments:3d} segments {each.num_threads:3d} threads"
            for name, each in self.held.items()
        ]
        return [*rows, *(f"{name:<18} pages {dict(pages)}" for name, pages in self.pages.items())]


def processes(world: Deployment) -> dict[str, int]:
    """Pids of every process of a deployment by name; ranks are numbered in the order of their pids."""
    found = {}
    for part in world.parts:
        if not part.is_alive:
            continue
        found[part.name] = part.pid
        for index, pid in enumerate(part.rank_pids):
            found[f"{part.name} rank {index}"] = pid
    return found


def snapshot(world: Deployment) -> Snapshot:
    """Looks at everything now; a process that is ending is left out."""
    pids = processes(world)
    held = {name: found for name, pid in pids.items() if (found := _held(pid)) is not None}
    pages = {part.name: server_pages(world, part.name) for part in world.instances if part.is_alive}
    segments = frozenset(name for pid in pids.values() for name in named_segments(pid))
    return Snapshot(monotonic(), held, pids, pages, segments)


def server_pages(world: Deployment, name: str) -> dict[str, int]:
    """Page counts that an instance tells."""
    (part,) = [each for each in world.instances if each.name == name]
    answer = part.ask("/server_info", key=world.want.api_key)
    assert answer.status == 200, f"{name}: /server_info is {answer.status}: {answer.text}"
    return dict(answer.json["pages"])


def _held(pid: int) -> Held | None:
    root = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        maps = (root / "maps").read_text().splitlines()
        fds = os.listdir(root / "fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if "RssAnon" not in fields:  # it has ended, and its parent has not looked yet
        return None
    mapped = {line.split(None, 5)[5] for line in maps if _SHM in line or _MEMFD in line}
    return Held(int(fields["RssAnon"].split()[0]) << 10, len(fds), len(mapped), int(fields["Threads"]))


def slope_per_s(points: Iterable[tuple[float, float]]) -> float:
    """Of the line through the points, by least squares."""
    pairs = list(points)
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be more at the end than after the warm-up."""

    process_bytes: int = 24 << 20
    """Growth of one process over the whole run, by its slope and by its two ends alike."""
    num_fds: int = 6
    num_segments: int = 0
    num_threads: int = 8


def growth(seen: Sequence[Snapshot], bounds: Bounds = Bounds()) -> list[str]:  # noqa: B008 - frozen
    """What grew by more than it may between the first and the last snapshot, all taken when idle or alike."""
    first, last = seen[0], seen[-1]
    found = [f"lost: {name}" for name in first.pids if name not in last.held]
    found += [
        f"another process: {name}"
        for name in first.pids
        if last.pids.get(name) not in (first.pids[name], None)
    ]
    for name, before in first.held.items():
        after = last.held.get(name)
        if after is None:
            continue
        found += _grown(name, before, after, bounds)
        points = [(each.at_s, each.held[name].memory_bytes) for each in seen if name in each.held]
        risen = slope_per_s(points) * (points[-1][0] - points[0][0])
        if min(risen, after.memory_bytes - before.memory_bytes) > bounds.process_bytes:
            found.append(f"{name}: memory grew by {risen / 2**20:.1f} MiB")
    return found


def _grown(name: str, before: Held, after: Held, bounds: Bounds) -> list[str]:
    limits = (
        ("num_fds", bounds.num_fds),
        ("num_segments", bounds.num_segments),
        ("num_threads", bounds.num_threads),
    )
    return [
        f"{name}: {what} went from {getattr(before, what)} to {getattr(after, what)}"
        for what, limit in limits
        if getattr(after, what) - getattr(before, what) > limit
    ]


def lost_pages(pages: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Instances that are idle and yet hold pages; a cached prefix counts as free."""
    found = []
    for name, counts in pages.items():
        held = {what: counts[what] for what in ("used", "leased", "quarantined") if counts.get(what)}
        if held or counts["free"] != counts["total"]:
            found.append(f"{name}: {dict(counts)}")
    return found
