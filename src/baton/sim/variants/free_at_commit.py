"""Source pages are free as soon as the engine has committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.session.handles import Sending
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_reading = Sending.reading


def _until_commit(self: Sending) -> dict[str, frozenset[int]]:
    return {} if self._is_sealed else _reading(self)


@contextmanager
def broken() -> Iterator[None]:
    """Has a committed transfer read nothing."""
    with patched(Sending, reading=_until_commit):
        yield


VARIANT = Variant(
    "source pages are free as soon as the engine commits",
    broken,
    ("source_pages", "bytes_right", "clean"),
)
