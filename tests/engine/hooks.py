"""Hooks of a forward that do nothing."""

from __future__ import annotations

from baton.engine.commands import ScheduledBatch


class NoHooks:
    """Nothing is handed over."""

    def before_forward(self, batch: ScheduledBatch) -> None: ...
    def layer_done(self, layer: int) -> None: ...
    def after_forward(self) -> None: ...
