"""Who is given the next request: one file per policy, found by module name."""

import importlib
import pkgutil
from functools import cache

from baton.errors import ConfigError
from baton.router.candidates import Candidate, Policy

__all__ = ["Candidate", "Policy", "make_policy", "policy_names"]


@cache
def policy_names() -> tuple[str, ...]:
    """The policies there are, which is every module here."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make_policy(name: str) -> Policy:
    """A policy with a memory of its own."""
    if name not in policy_names():
        raise ConfigError(f"policy {name!r} is not known; use one of {', '.join(policy_names())}")
    made: Policy = importlib.import_module(f"{__name__}.{name}").make()
    return made
