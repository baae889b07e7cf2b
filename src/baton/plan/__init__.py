"""Which rank sends which bytes to which rank: caches, layouts, routes, steps. Pure, numpy only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.plan.exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the names when one is asked for: a router uses one module of this package, and starts fast."""
    return getattr(import_module("baton.plan.exports"), name)
