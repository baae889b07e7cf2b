"""Where protocol meets transport. Everything that an engine needs is exported here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.session.exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the names when one is asked for: a router uses one module of this package, and starts fast."""
    return getattr(import_module("baton.session.exports"), name)
