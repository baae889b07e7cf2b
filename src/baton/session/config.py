"""The identity that a driver introduces itself with, and its timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.plan import PackCost, Spec
from baton.plan.wire import spec_to_bytes
from baton.protocol.messages import Introduction
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.timings import Timings


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """An instance, as its coordinator knows it; with `rank` set, one of its ranks."""

    instance: str
    epoch: int
    spec: Spec
    transport: str
    fingerprint: str = ""
    timings: Timings = field(default_factory=Timings)
    cost: PackCost = field(default_factory=PackCost)
    """When its transfers are packed; a target without staging never packs."""
    ungranted_share_max: float = 0.5
    """The share of a source's pool that requests without a grant may hold together."""
    rank: int = -1

    def introduction(self) -> Introduction:
        """The first message to peers, and between a coordinator and its ranks."""
        return Introduction(
            instance=self.instance,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            spec=spec_to_bytes(self.spec),
            transport=self.transport,
            rank=self.rank,
        )

    def cause(self, why: Why, stage: Stage, text: str) -> Cause:
        """A cause at this coordinator or on this rank."""
        return Cause(why=why, stage=stage, instance=self.instance, rank=self.rank, text=text)
