"""Transports around transports, one module each: every one takes a transport and keeps the same contract."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from functools import cache
from typing import Any

from baton.errors import ConfigError
from baton.transport.base import Transport

__all__ = ["wrap", "wrapper_names"]

SHARED = frozenset({"links", "passing", "timing"})
"""What is in this package and is no wrapper."""


def wrap(name: str, inner: Transport, **options: Any) -> Transport:
    """The wrapper of this name around a transport, which is the wrapper's from now on."""
    if name not in wrapper_names():
        raise ConfigError(f"wrapper '{name}' is not known; write one of {', '.join(wrapper_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    known = [field.name for field in fields(module.CONFIG)]
    for option in options:
        if option not in known:
            raise ConfigError(f"wrapper '{name}' has no option '{option}'; it has {', '.join(known)}")
    wrapped: Transport = module.WRAPPER(inner, module.CONFIG(**options))
    return wrapped


@cache
def wrapper_names() -> tuple[str, ...]:
    """The wrappers there are: every module here but the shared ones."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED))
