"""How long things may take, and the two deadlines of a transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from baton.errors import ConfigError


def check_progress(progress_s: float) -> None:
    """Raises ConfigError on what cannot be a progress deadline."""
    if not 0 < progress_s < math.inf:
        raise ConfigError(f"progress_s is {progress_s}; give a finite number of seconds above 0")


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. A transfer has two deadlines: one from its last progress, one in total."""

    beat_s: float = 0.25
    """How often a link sends a heartbeat."""
    silence_s: float = 3.0
    """How long a link may be silent before its other end counts as lost."""
    offer_s: float = 120.0
    """How long one side waits for a transfer that the other has not mentioned. An engine that has it in its
    queue mentions it again and again, while it computes."""
    progress_s: float = 30.0
    """How long a transfer that both sides have mentioned may go without progress, unless a request names
    another limit."""
    total_s: float = 600.0
    """How long a transfer may take in all, without the time that it waited in a queue."""
    copy_s: float = 5.0
    """How long one copy may go without progress."""
    ask_again_s: float = 0.25
    """How long an unanswered query (quiet? outcome?) waits before it is repeated; it backs off."""
    ask_again_s_max: float = 4.0
    stuck_s: float = 10.0
    """How long pages may be in quarantine before they count as stuck: proving quiet takes a moment."""
    redial_s: float = 0.1
    redial_s_max: float = 5.0
    look_up_s: float = 5.0
    """How long a source is looked up: a restarted registry learns of it after a moment."""
    linger_s: float = 60.0
    """How long the outcome of a transfer is kept for a peer that has not heard it."""

    def __post_init__(self) -> None:
        check_progress(self.progress_s)
        if not 0 < self.total_s < math.inf:
            raise ConfigError(f"total_s is {self.total_s}; give a finite number of seconds above 0")


class Deadlines(msgspec.Struct, frozen=True):
    """When a transfer began here, when it last made progress, and when a query was last sent."""

    timings: Timings
    began: float
    moved: float
    has_begun: bool = False
    """Whether both sides work on it; until then it waits for `offer_s`."""
    asked: float = 0.0
    progress_s: float = 0.0
    """The longest progress deadline that an engine of either side named for this transfer; 0: none did, and
    the timings hold."""

    def named(self, progress_s: float) -> Deadlines:
        """With what a rank or the other side names; what cannot be a deadline is passed over."""
        if not self.progress_s < progress_s < math.inf:
            return self
        return msgspec.structs.replace(self, progress_s=progress_s)

    def queued(self, now: float) -> Deadlines:
        """The transfer is in the queue of an engine that computes: both deadlines begin anew."""
        return self if self.has_begun else msgspec.structs.replace(self, began=now, moved=now)

    def met(self, now: float) -> Deadlines:
        """Both sides have mentioned the transfer and work on it."""
        return msgspec.structs.replace(self, moved=now, has_begun=True)

    def passed(self, now: float) -> str:
        """Which deadline passed, in words; empty if none did."""
        if text := self.passed_in_all(now):
            return text
        if now - self.moved >= self._patience_s:
            setting = "progress_s" if self.has_begun else "offer_s"
            return f"no progress for {self._patience_s:g} s; raise {setting} if it is only slow"
        return ""

    def passed_in_all(self, now: float) -> str:
        """The total deadline alone, for a side that cannot see progress."""
        if now - self.began >= self.timings.total_s:
            return f"not done {self.timings.total_s:g} s after it began; raise total_s if it is only slow"
        return ""

    @property
    def _patience_s(self) -> float:
        if not self.has_begun:
            return self.timings.offer_s
        return self.progress_s or self.timings.progress_s
