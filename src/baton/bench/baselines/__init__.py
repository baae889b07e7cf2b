"""What a transport is measured against: the same bytes moved by the barest means, in the same run.

A module NAME here belongs to the transport of that name and offers `Bare(spans, num_bytes)`, a context
manager whose `once()` moves the spans and returns when they are there. `memcpy` belongs to all.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager
from typing import Protocol

from baton.plan.steps import Spans


class Bare(Protocol):
    """The barest way to move some spans."""

    def once(self) -> None:
        """Moves the spans and returns when they are there."""


def baseline(name: str, spans: Spans, num_bytes: int) -> AbstractContextManager[Bare] | None:
    """The baseline of a transport, or None where it has none."""
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        return None
    found: AbstractContextManager[Bare] = importlib.import_module(f"{__name__}.{name}").Bare(spans, num_bytes)
    return found
