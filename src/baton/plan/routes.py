"""A plan: routes as rules that hold for every prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.plan.mirrors import Turns
from baton.plan.ownership import Spec
from baton.plan.ranges import Range, Ranges


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank sends to one target rank of one component, as a rule for any prompt."""

    source: int
    target: int
    component: str
    layers: Ranges
    units: Range
    source_share: int
    target_share: int
    turns: Turns


@dataclass(frozen=True, slots=True)
class Plan:
    """Every route between one dp group of the source and one of the target."""

    source: Spec
    target: Spec
    source_dp: int
    target_dp: int
    routes: tuple[Route, ...]

    @property
    def deal_tokens(self) -> int:
        """Tokens that go to one mirror together: the larger page."""
        return max(self.source.storage.page_tokens, self.target.storage.page_tokens)

    def narrowed(self, *, source: int | None = None, target: int | None = None) -> Plan:
        """The routes of one rank alone, for that rank to bind: it knows no other rank's page table."""
        kept = tuple(
            route
            for route in self.routes
            if source in (None, route.source) and target in (None, route.target)
        )
        return replace(self, routes=kept)
