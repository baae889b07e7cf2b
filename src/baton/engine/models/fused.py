"""Whether layers use the Triton kernels of `baton.engine.models.kernels`: on a GPU, where Triton is there."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor


def kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels, for a tensor that they can read: on a GPU, with its channels side by side."""
    return _kernels() if x.is_cuda and x.stride(-1) == 1 and x.numel() else None


@cache
def _kernels() -> ModuleType | None:
    # By name: it brings a compiler with it, seconds of import that a host has no use for.
    return import_module("baton.engine.models.kernels") if find_spec("triton") else None
