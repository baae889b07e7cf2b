"""Copies begin before the device has written what they read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.copies import SourceCopies
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant
from baton.transport import NOW

_dispatch = SourceCopies._submit


def _at_once(self: SourceCopies, flight: Any, load: Any, staged_at: int, fence: Any) -> None:
    _dispatch(self, flight, load, staged_at, NOW)


@contextmanager
def broken() -> Iterator[None]:
    """Takes every fence for ready."""
    with patched(SourceCopies, _submit=_at_once):
        yield


VARIANT = Variant("copies do not wait for their fences", broken, ("bytes_right",), {"verified_share": 0.0})
