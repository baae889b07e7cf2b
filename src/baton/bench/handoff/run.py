"""A paced hand-over, measured and compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from baton.bench.handoff.figures import Figures, Serial, figures, inner_bytes_per_s, serial_of
from baton.bench.handoff.fleet import Fleet, ask_all
from baton.bench.handoff.pacing import Pace, schedule
from baton.bench.handoff.records import HandOver
from baton.bench.handoff.scene import Scene, cache_of, fitted, room_bytes
from baton.bench.handoff.story import story
from baton.errors import EngineError
from baton.observe import Timeline
from baton.plan.execution import Verdict
from baton.plan.routes import resolve

NUM_CALIBRATIONS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """How hand-overs are paced and repeated."""

    policy: str = "cost"
    layer_s: float | None = None
    """One layer of the whole prompt; None takes it from `ratio`."""
    ratio: float = 1.0
    """Compute by serial transfer time."""
    chunk_tokens: int = 0
    repeats: int = 3
    is_verified: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What `baton bench handoff` found out."""

    scene: Scene
    pace: Pace
    serial: Serial
    runs: list[Figures]
    verdict: Verdict
    timeline: Timeline
    """Of the run whose tth is the median."""
    notes: list[str]

    def middle(self, name: str) -> float:
        """The median of a figure over the runs."""
        return float(median(getattr(run, name) for run in self.runs))

    @property
    def is_right(self) -> bool:
        """Whether every byte is."""
        return self.verdict.num_right == self.verdict.num_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """Everything but the timeline."""
        return {
            "scene": asdict(self.scene),
            "pace": asdict(self.pace),
            "serial": {"transfer_s": dict(self.serial.transfer_s), "overhead_s": self.serial.overhead_s},
            "runs": [asdict(run) for run in self.runs],
            "median": {name: self.middle(name) for name in Figures.__slots__},
            "bytes_compared": self.verdict.num_bytes,
            "bytes_right": self.verdict.num_right,
            "notes": self.notes,
        }


def check(scene: Scene, options: Options) -> None:
    """Raises on what could not be measured, before anything is started."""
    schedule(scene, Pace(policy=options.policy, chunk_tokens=options.chunk_tokens))


def run(scene: Scene, options: Options, tell: Callable[[str], None]) -> Measured:
    """Starts everything, hands over `repeats` times, compares after each, and ends everything."""
    kept = fitted(scene, room_bytes())
    notes = []
    if kept != scene:
        all_layers = cache_of(scene).num_layers
        notes.append(f"{kept.num_layers} of {all_layers} layers, which is what memory has room for")
    tell("starting the processes")
    with Fleet(kept) as fleet:
        tell("writing the source's pools")
        fleet.fill([0])
        tell("calibrating")
        serial = calibrate(fleet, options.chunk_tokens)
        pace = paced(kept, serial, options)
        found: list[HandOver] = []
        verdicts = []
        for index in range(options.repeats):
            tell(f"handing over, {index + 1} of {options.repeats}")
            ask_all(fleet.targets, "wipe")
            found.append(succeeded(fleet.hand_over(pace, is_verified=options.is_verified)))
            verdicts.append(fleet.compare())
    runs = [figures(each, serial) for each in found]
    notes += link_notes(kept, found)
    middle = sorted(found, key=lambda each: each.received.settled_s - each.start_s)[len(found) // 2]
    return Measured(kept, pace, serial, runs, total(verdicts), story(middle, kept.model), notes)


def total(verdicts: Sequence[Verdict]) -> Verdict:
    """Several as one."""
    return Verdict(sum(each.num_bytes for each in verdicts), sum(each.num_right for each in verdicts))


def calibrate(fleet: Fleet, chunk_tokens: int = 0) -> Serial:
    """The serial transfer time, and what each group costs, with everything ready at once."""
    fleet.hand_over(Pace())  # connections are made with the first one
    whole = [succeeded(fleet.hand_over(Pace())) for _ in range(NUM_CALIBRATIONS)]
    layered = Pace(policy="fixed:1", chunk_tokens=chunk_tokens)
    return serial_of(whole, [succeeded(fleet.hand_over(layered)) for _ in range(NUM_CALIBRATIONS)])


def paced(scene: Scene, serial: Serial, options: Options) -> Pace:
    """Layer time and what the policy is told, from the options and from what was measured."""
    layer_s = options.layer_s
    if layer_s is None:
        layer_s = options.ratio * serial.busiest_s / cache_of(scene).num_layers
    return Pace(
        layer_s=layer_s,
        policy=options.policy,
        chunk_tokens=options.chunk_tokens,
        bytes_per_s=_bytes_per_s(scene, serial),
        overhead_s=serial.overhead_s,
    )


def _bytes_per_s(scene: Scene, serial: Serial) -> float:
    """What the busiest rank sent, by the time it took."""
    rank = max(serial.transfer_s, key=lambda each: serial.transfer_s[each], default=None)
    if rank is None or not serial.transfer_s[rank]:
        return 1e9
    routes = scene.plan.narrowed(source=rank)
    from_rank = sum(route.num_bytes for route in resolve(routes, scene.prompt))
    return max(1.0, from_rank / serial.transfer_s[rank])


def succeeded(found: HandOver) -> HandOver:
    """The same hand-over; raises where it did not come to ready."""
    if not found.is_ready:
        raise EngineError(f"{found.transfer} was not handed over: {found.received.outcome}")
    for sent in found.sent.values():
        if sent.outcome != "ready":
            raise EngineError(f"{found.transfer}: source rank {sent.rank} was told {sent.outcome}")
    return found


def link_notes(scene: Scene, found: list[HandOver]) -> list[str]:
    """What has to be said where the transport under the link is slower than the link."""
    if not scene.link_bytes_per_s or not found:
        return []
    inner = median(inner_bytes_per_s(each) for each in found)
    link = scene.link_bytes_per_s
    if inner >= 1.5 * link:
        return []
    text = "slower than" if inner < link else "hardly faster than"
    return [
        f"the transport under the link reached {inner / 1e6:.0f} MB/s a rank, {text} its "
        f"{link / 1e6:.0f} MB/s: transfer times are in part the transport's own"
    ]
