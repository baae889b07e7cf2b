"""The options of one seed: which instances, how much work, and which faults at which strength."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.protocol.timings import Timings

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
class Strength:
    """What the simulated transport is capable of."""

    can_enforce_grants: bool = True
    can_revoke: bool = True
    can_announce: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """A `_share` is the probability for each request."""

    family: int = 0
    """Number of the instance family; see baton.sim.families."""
    num_requests: int = 3
    spread_s: float = 0.03
    """The requests arrive within this time."""
    has_same_ends: bool = False
    """Whether all requests go between the same two dp groups, so that their ranks have copied before."""
    faults: Mapping[str, Any] = field(default_factory=dict)
    """Faults by name; see baton.sim.faults."""
    faults_s: float = 0.5
    """Faults happen before this time only."""
    strength: Strength = field(default_factory=Strength)
    timings: Timings = TIMINGS
    slowness: float = 1.0
    """Factor on the time that prefill takes."""
    decode_slowness: float = 1.0
    """Factor on the time that decoding takes."""
    finish_share: float = 0.05
    """Answers that end at the source."""
    held_share: float = 0.4
    """Prompts of which the target may hold a prefix."""
    one_call_share: float = 0.3
    """Requests for which one rank of the target names the pages of all ranks."""
    verified_share: float = 0.2
    """Requests with checksums."""
    fence_share: float = 0.3
    """Target pages that the device still writes to when they are named."""
    withdraw_share: float = 0.0
    """Requests that the source preempts in the middle of their prefill and resumes with other pages."""
    address_share: float = 0.2
    """Sources that a target knows by address, not by name."""
    epochless_share: float = 0.5
    """Ranks that learn the epoch of their coordinator when they attach."""
    is_packing: bool = False
