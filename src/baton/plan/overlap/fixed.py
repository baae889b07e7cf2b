"""Groups of the number of layers that the policy's text names."""

import re

from baton.errors import ConfigError
from baton.plan.overlap.base import Groups, LayerTimes, equal_groups

SPELLING = "fixed:N"

# One spelling per size, so that logs and configurations compare as text.
SIZE_PATTERN = re.compile(r"[1-9][0-9]{0,5}")


def groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """Groups of `option` layers, the last one with what is left."""
    if option is None or SIZE_PATTERN.fullmatch(option) is None:
        text = "fixed" if option is None else f"fixed:{option}"
        raise ConfigError(
            f"overlap policy '{text}': fixed needs its layers per group, 1 to 999999 without leading zeros; "
            "write for example 'fixed:8'"
        )
    return equal_groups(times.num_layers, int(option))
