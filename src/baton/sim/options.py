"""What one seed is about: who is there, how much work, and which faults at which strength."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from baton.protocol.timings import Timings
from baton.sim.catalogue import NUM_FAMILIES
from baton.sim.faults import draw_faults
from baton.sim.transport.endpoint import Strength

TIMINGS = Timings(
    beat_s=0.2,
    silence_s=0.7,
    offer_s=0.8,
    progress_s=0.6,
    total_s=2.0,
    copy_s=0.25,
    ask_again_s=0.05,
    ask_again_s_max=0.3,
    redial_s=0.02,
    redial_s_max=0.2,
    linger_s=1.0,
)


@dataclass(frozen=True, slots=True)
class Habits:
    """How the engines of a world go about their work: shares are probabilities for each request."""

    slowness: float = 1.0
    """Of computing."""
    finish_share: float = 0.05
    """Answers that end at the source."""
    held_share: float = 0.4
    """Prompts of which the target may hold a prefix."""
    one_call_share: float = 0.3
    """Requests for which one rank of the target names the pages of all."""
    verified_share: float = 0.2
    fence_share: float = 0.3
    """Pages with which the device is not done yet when they are named."""
    address_share: float = 0.2
    """Sources that a target knows by their address and not by their name."""
    pages_s_max: float = 0.3
    """How long a target waits for pages before it declines."""
    is_packing: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """A seed's world."""

    family: int = 0
    num_requests: int = 3
    spread_s: float = 0.03
    """Over how long the requests come."""
    has_same_ends: bool = False
    """Whether all requests go between the same two groups of ranks, which come to know each other."""
    faults: Mapping[str, Any] = field(default_factory=dict)
    """By the name of its module: how strong each fault is."""
    faults_s: float = 0.5
    """After this much time there are no faults any more."""
    strength: Strength = field(default_factory=Strength)
    habits: Habits = field(default_factory=Habits)
    timings: Timings = TIMINGS

    def but(self, **changes: Any) -> Options:
        """The same with some of them, or of the habits, changed."""
        habits = {name: changes.pop(name) for name in HABITS & changes.keys()}
        return replace(self, habits=replace(self.habits, **habits), **changes)


HABITS = frozenset(found.name for found in fields(Habits))


def draw_options(chance: random.Random) -> Options:
    """The options of a seed."""
    is_strong = chance.random() < 0.5
    found = Options(
        family=chance.randrange(NUM_FAMILIES),
        num_requests=chance.choice((1, 2, 2, 3, 3, 4)),
        spread_s=chance.choice((0.0, 0.01, 0.05)),
        faults=draw_faults(chance),
        faults_s=chance.choice((0.1, 0.3, 0.6)),
        strength=Strength(
            can_enforce_grants=is_strong or chance.random() < 0.3,
            can_revoke=is_strong or chance.random() < 0.3,
        ),
        habits=Habits(
            slowness=chance.choice((0.3, 1.0, 3.0)),
            held_share=chance.choice((0.0, 0.5, 1.0)),
            one_call_share=chance.choice((0.0, 1.0)),
            verified_share=chance.choice((0.0, 0.0, 1.0)),
            is_packing=chance.random() < 0.25,
        ),
    )
    if found.strength.can_enforce_grants or chance.random() < 0.25:
        return found
    # Grants go out ahead of opening only where copies have gone before, and nothing is left to do with them.
    spread_s = chance.choice((0.1, 0.3, 0.6))
    return found.but(
        num_requests=8, spread_s=spread_s, has_same_ends=True, verified_share=0.0, is_packing=False
    )
