"""Checksums are made and sent, and never compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session import tensors
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant


def _none(*args: Any) -> dict[str, bytes]:
    return {}


@contextmanager
def broken() -> Iterator[None]:
    """Leaves nothing to compare at the target."""
    with patched(tensors, checksums=_none):
        yield


VARIANT = Variant("checksums are not compared", broken, ("bytes_right",), scenario="bad-wire", num_tries=10)
