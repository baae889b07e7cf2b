"""The two deadlines of a transfer, for the coordinators of both sides."""

from __future__ import annotations

import msgspec

from baton.protocol.timings import Timings


class Deadlines(msgspec.Struct, frozen=True):
    """When a transfer was begun here, when it last moved, and when a question was put last."""

    timings: Timings
    began: float
    moved: float
    has_begun: bool = False
    """Whether the other side has spoken of it; until then it waits for `offer_s`."""
    asked: float = 0.0

    def passed(self, now: float) -> str:
        """Which deadline passed, in words; empty if none did."""
        if passed := self.passed_in_all(now):
            return passed
        if now - self.moved >= self._patience_s:
            return f"no progress for {self._patience_s:g} s"
        return ""

    def passed_in_all(self, now: float) -> str:
        """The same for the total alone, where progress is not for this side to see."""
        if now - self.began >= self.timings.total_s:
            return f"not done {self.timings.total_s:g} s after it began"
        return ""

    @property
    def _patience_s(self) -> float:
        return self.timings.progress_s if self.has_begun else self.timings.offer_s
