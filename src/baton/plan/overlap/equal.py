"""Groups of equal size: all layers in one, as many as the policy's text names, or by the prompt's length."""

import math
import re

from baton.errors import ConfigError
from baton.plan.overlap import Groups, LayerTimes, Policy, equal_groups, refuse_option

# One spelling per size, so that logs and configurations compare as text.
SIZE_PATTERN = re.compile(r"[1-9][0-9]{0,5}")

# `adaptive`: from 10 groups for prompts of 3072 tokens down to 4 for those of three times as many.
TOKENS_MIN, TOKENS_SATURATED = 3072, 3 * 3072
NUM_GROUPS_MAX, NUM_GROUPS_MIN = 10, 4
SHALLOW_LAYERS_MAX = 4
"""So few layers could only make one-layer groups; they are not split."""


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


def adaptive_groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """Fewer, larger groups as prompts grow longer; one group for short prompts and shallow models."""
    refuse_option("adaptive", option)
    if avg_tokens < 0:
        raise ConfigError(f"adaptive overlap: {avg_tokens} tokens on average; give no negative token count")
    num_layers = times.num_layers
    if avg_tokens < TOKENS_MIN or num_layers <= SHALLOW_LAYERS_MAX:
        return equal_groups(num_layers, num_layers)
    progress = min(1.0, (avg_tokens - TOKENS_MIN) / (TOKENS_SATURATED - TOKENS_MIN))
    # The number stays a float: rounding it first would move the steps of the size.
    num_groups = NUM_GROUPS_MAX - progress * (NUM_GROUPS_MAX - NUM_GROUPS_MIN)
    return equal_groups(num_layers, max(1, math.floor(num_layers / num_groups)))


POLICIES = {
    "adaptive": Policy("adaptive", adaptive_groups),
    "fixed": Policy("fixed:N", fixed_groups),
    "off": Policy("off", off_groups),
}
