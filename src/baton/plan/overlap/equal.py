"""Groups of equal size: all layers in one, or as many as the policy's text names."""

import re

from baton.errors import ConfigError
from baton.plan.overlap.base import Groups, LayerTimes, Policy, equal_groups, refuse_option

# One spelling per size, so that logs and configurations compare as text.
SIZE_PATTERN = re.compile(r"[1-9][0-9]{0,5}")


def off_groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """One group: compute every layer, then transfer."""
    refuse_option("off", option)
    return equal_groups(times.num_layers, times.num_layers)


def fixed_groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """Groups of `option` layers, the last one with what is left."""
    if option is None or SIZE_PATTERN.fullmatch(option) is None:
        text = "fixed" if option is None else f"fixed:{option}"
        raise ConfigError(
            f"overlap policy '{text}': fixed needs its layers per group, 1 to 999999 without leading zeros; "
            "write for example 'fixed:8'"
        )
    return equal_groups(times.num_layers, int(option))


POLICIES = {"fixed": Policy("fixed:N", fixed_groups), "off": Policy("off", off_groups)}
