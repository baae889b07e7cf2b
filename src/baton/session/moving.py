"""The work of a chunk that is not copying between ranks: packing, unpacking and checksums.

These run beside the driver, on registered buffers: numpy arrays or torch tensors, of one device. Each call is
done with its bytes when it returns. torch takes seconds to import, and a rank without staging never needs
it but for checksums: it is looked up when somebody does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from baton.plan.chunks import Gathers
from baton.plan.steps import Pack, Unpack

if TYPE_CHECKING:
    from baton.session.tensors import Buffer


@cache
def _tensors() -> Any:
    return importlib.import_module("baton.session.tensors")


def preload() -> None:
    """Takes the time for torch now, instead of with the first chunk that is packed."""
    _tensors()


def run_packs(packs: Iterable[Pack], buffers: Mapping[str, Buffer], staging: Buffer) -> None:
    """Gathers a chunk into its place in the source's staging."""
    _tensors().run_packs(packs, buffers, staging)


def run_unpacks(unpacks: Iterable[Unpack], staging: Buffer, buffers: Mapping[str, Buffer]) -> None:
    """Scatters a chunk from its place in the target's staging, changing element types on the way."""
    _tensors().run_unpacks(unpacks, staging, buffers)


def checksums(
    sums: Gathers, buffers: Mapping[str, Buffer], staging: Buffer | None = None
) -> dict[str, bytes]:
    """By component: the xxh3 of a chunk's bytes in canonical order; `staging` is the chunk's place in it."""
    found: dict[str, bytes] = _tensors().checksums(sums, buffers, staging)
    return found
