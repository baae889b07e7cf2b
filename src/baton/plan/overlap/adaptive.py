"""Equal groups whose number falls, between two bounds, as prompts grow longer."""

import math
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.plan.overlap.base import Groups, LayerTimes, Policy, equal_groups, refuse_option

# At this depth the default bounds could only give one-layer groups.
SHALLOW_LAYERS_MAX = 4
SATURATION_MULTIPLIER_MIN = 1.01


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """The five settings of the formula, with their defaults; an explicit group size of 0 means adaptive."""

    tokens_min: int = 3072
    iterations_max: int = 10
    iterations_min: int = 4
    saturation_multiplier: float = 3.0
    explicit_group_size: int = 0

    def __post_init__(self) -> None:
        """Refuse what the formula's own clamps do not repair."""
        if not 1 <= self.iterations_min <= self.iterations_max:
            raise ConfigError(
                f"adaptive overlap: iterations_min {self.iterations_min}, "
                f"iterations_max {self.iterations_max}; give 1 <= iterations_min <= iterations_max"
            )
        if not math.isfinite(self.saturation_multiplier):
            raise ConfigError(
                f"adaptive overlap: saturation_multiplier {self.saturation_multiplier}; give a finite number"
            )
        if self.explicit_group_size < 0:
            raise ConfigError(
                f"adaptive overlap: explicit_group_size {self.explicit_group_size}; give a number of layers, "
                "or 0 for adaptive"
            )


DEFAULT_CONFIG = AdaptiveConfig()


def adaptive_groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """Equal groups of the size that the formula gives with its defaults."""
    refuse_option("adaptive", option)
    return equal_groups(times.num_layers, group_size(times.num_layers, avg_tokens, DEFAULT_CONFIG))


def group_size(num_layers: int, avg_tokens: int, config: AdaptiveConfig) -> int:
    """Layers per group; all of them where pipelining is off."""
    if num_layers < 1 or avg_tokens < 0:
        raise ConfigError(
            f"adaptive overlap: {num_layers} layers, {avg_tokens} tokens on average; "
            "give at least one layer and no negative token count"
        )
    if config.explicit_group_size > 0:
        return config.explicit_group_size
    tokens_min = max(1, config.tokens_min)
    if avg_tokens < tokens_min or num_layers <= SHALLOW_LAYERS_MAX:
        return num_layers
    saturation_tokens = tokens_min * max(SATURATION_MULTIPLIER_MIN, config.saturation_multiplier)
    progress = _clamp((avg_tokens - tokens_min) / (saturation_tokens - tokens_min), 0.0, 1.0)
    num_iterations = config.iterations_max - progress * (config.iterations_max - config.iterations_min)
    # The number stays a float: rounding it first would move the steps of the size.
    num_iterations = _clamp(num_iterations, config.iterations_min, config.iterations_max)
    return max(1, math.floor(num_layers / num_iterations))


def _clamp(value: float, value_min: float, value_max: float) -> float:
    return max(value_min, min(value, value_max))


POLICIES = {"adaptive": Policy("adaptive", adaptive_groups)}
