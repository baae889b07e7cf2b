"""Where to cut the layers of a prefill, so that a group is transferred while later ones are computed."""

import importlib
import pkgutil
from functools import cache

from baton.errors import ConfigError
from baton.plan.overlap.base import (
    Groups,
    LayerTimes,
    Outcome,
    Policy,
    bound,
    check_groups,
    completion_s,
    efficiency,
    exposed_s,
    measure,
)

__all__ = [
    "Groups",
    "LayerTimes",
    "Outcome",
    "Policy",
    "bound",
    "check_groups",
    "choose",
    "completion_s",
    "efficiency",
    "exposed_s",
    "measure",
    "policy_names",
]


def choose(policy: str, times: LayerTimes, avg_tokens: int) -> Groups:
    """The groups that the policy `cost`, `adaptive`, `fixed:N` or `off` makes of these layers."""
    name, separator, option = policy.partition(":")
    if name not in _policies():
        spellings = ", ".join(known.spelling for known in _policies().values())
        raise ConfigError(f"overlap policy '{policy}' is not known; write one of {spellings}")
    groups = _policies()[name].groups(times, avg_tokens, option if separator else None)
    check_groups(groups, times.num_layers)
    return groups


def policy_names() -> tuple[str, ...]:
    """The policies that the modules of this folder list."""
    return tuple(_policies())


@cache
def _policies() -> dict[str, Policy]:
    policies: dict[str, Policy] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            policies |= importlib.import_module(f"{__name__}.{module.name}").POLICIES
    return dict(sorted(policies.items()))
