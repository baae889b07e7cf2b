"""Copies begin before the device has written what they read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.flights import Flights
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant
from baton.transport import NOW

_dispatch = Flights._dispatch


def _at_once(self: Flights, found: Any, flight: Any, load: Any, fence: Any) -> None:
    _dispatch(self, found, flight, load, NOW)


@contextmanager
def broken() -> Iterator[None]:
    """Takes every fence for ready."""
    with patched(Flights, _dispatch=_at_once):
        yield


VARIANT = Variant("copies do not wait for their fences", broken, ("bytes_right",), {"verified_share": 0.0})
