"""What a transfer costs beside bytes and compute, and how many can be under way at once.

Small transfers come one after another, each at its own moment, with all of its content ready: the time from
that moment to ready at the target, less the time in which a copy was under way, is control. It holds the
calls of the engines, every message of offer, grant, commit and verdict, binding, and the waking of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import monotonic
from typing import Any

from baton.bench.handoff.figures import Serial, figures
from baton.bench.handoff.fleet import LEAD_S, Fleet, ask_all
from baton.bench.handoff.mill import Grist
from baton.bench.handoff.pacing import Pace
from baton.bench.handoff.records import Order
from baton.bench.handoff.run import succeeded
from baton.bench.handoff.scene import Scene, Side

MODEL = "paged:layers=4,heads=4,dim=16"
NUM_TOKENS = 64
SPACING_S = 0.04
CONTROL_S_TARGET = 3e-3
NUM_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Control:
    """Control times, and what became of the transfers that ran at once."""

    scene: Scene
    tth_s: list[float]
    control_s: list[float]
    num_at_once: int
    num_transfers: int
    num_failed: int
    num_held: int
    num_bytes: int
    num_right: int
    elapsed_s: float
    failures: dict[str, int]

    @property
    def control_s_median(self) -> float:
        """The middle one."""
        return median(self.control_s)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and every byte is right."""
        return not self.num_failed and not self.num_held and self.num_right == self.num_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """Medians and tails, and the rest as it is."""
        record = asdict(self)
        for name in ("tth_s", "control_s"):
            values = record.pop(name)
            cuts = quantiles(values, n=20, method="inclusive")
            record[name] = {
                "count": len(values),
                "best": min(values),
                "median": median(values),
                "p95": cuts[-1],
            }
        record["control_s"]["target"] = CONTROL_S_TARGET
        record["control_s"]["is_met"] = self.control_s_median <= CONTROL_S_TARGET
        return record


def small_scene(transport: str, source: str, target: str) -> Scene:
    """Tiny transfers between two instances, with a slot for each that runs at once."""
    sides = Side(source, page=16), Side(target, page=16)
    return Scene(MODEL, *sides, NUM_TOKENS, num_slots=NUM_AT_ONCE, transport=transport)


def run(scene: Scene, num_alone: int, num_rounds: int, tell: Callable[[str], None]) -> Control:
    """One after another, then as many at once as there are slots."""
    tell("starting the processes")
    with Fleet(scene) as fleet:
        fleet.fill([0])
        fleet.hand_over(Pace())
        tell(f"{num_alone} transfers, one after another")
        start_s = monotonic() + LEAD_S
        orders = [
            Order(fleet.new_transfer(), start_s=start_s + index * SPACING_S) for index in range(num_alone)
        ]
        found = [succeeded(each) for each in fleet.hand_over_all(orders, Pace())]
        tell(f"{scene.num_slots} transfers at once, {num_rounds} times each")
        grist = Grist("many", scene.num_slots, num_rounds)
        tallies = ask_all([*fleet.sources, *fleet.targets], "grind", asdict(grist))
    alone = [figures(each, Serial({})) for each in found]
    failures: dict[str, int] = {}
    for tally in tallies:
        for text, count in tally["failures"].items():
            failures[text] = failures.get(text, 0) + count
    return Control(
        scene=scene,
        tth_s=[each.tth_s for each in alone],
        control_s=[each.control_s for each in alone],
        num_at_once=min(tally["num_at_once_max"] for tally in tallies),
        num_transfers=scene.num_slots * num_rounds,
        num_failed=sum(sum(tally["failures"].values()) + tally["num_aborted"] for tally in tallies),
        num_held=sum(len(tally["held"]) for tally in tallies),
        num_bytes=sum(tally["num_bytes"] for tally in tallies),
        num_right=sum(tally["num_right"] for tally in tallies),
        elapsed_s=max(tally["elapsed_s"] for tally in tallies),
        failures=failures,
    )
