"""Groups of equal size: all layers in one, as many as the policy's text names, or by the prompt's length."""

import math
import re
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.plan.overlap import GroupPolicy, Groups, LayerTimes, equal_groups, refuse_option

# One spelling per size, so that logs and configurations compare as text.
SIZE_PATTERN = re.compile(r"[1-9][0-9]{0,5}")
ADAPTIVE_PATTERNS = {
    **dict.fromkeys(("min_tokens", "max_iters", "min_iters"), re.compile(r"[1-9][0-9]{0,7}")),
    "saturation": re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?"),
}
SATURATION_MIN = 1.01

SHALLOW_LAYERS_MAX = 4
"""So few layers could only make one-layer groups; they are not split."""


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """`max_iters` groups for prompts of `min_tokens`, fewer and larger ones for longer prompts, down to
    `min_iters` for `saturation` times as many tokens."""

    min_tokens: int = 3072
    max_iters: int = 10
    min_iters: int = 4
    saturation: float = 3.0


def off_groups(times: LayerTimes, num_tokens: int, option: str | None) -> Groups:
    """One group: compute every layer, then transfer."""
    refuse_option("off", option)
    return equal_groups(times.num_layers, times.num_layers)


def fixed_groups(times: LayerTimes, num_tokens: int, option: str | None) -> Groups:
    """Groups of `option` layers, the last one with what is left."""
    if option is None or SIZE_PATTERN.fullmatch(option) is None:
        text = "fixed" if option is None else f"fixed:{option}"
        raise ConfigError(
            f"overlap policy '{text}': fixed needs its layers per group, 1 to 999999 without leading zeros; "
            "write for example 'fixed:8'"
        )
    return equal_groups(times.num_layers, int(option))


def adaptive_groups(times: LayerTimes, num_tokens: int, option: str | None) -> Groups:
    """Fewer, larger groups as prompts grow longer; one group for short prompts and shallow models."""
    settings = parse_adaptive(option)
    if num_tokens < 0:
        raise ConfigError(f"adaptive overlap: a prompt of {num_tokens} tokens; give no negative token count")
    num_layers = times.num_layers
    if num_tokens < settings.min_tokens or num_layers <= SHALLOW_LAYERS_MAX:
        return equal_groups(num_layers, num_layers)
    tokens_saturated = settings.min_tokens * settings.saturation
    progress = min(1.0, (num_tokens - settings.min_tokens) / (tokens_saturated - settings.min_tokens))
    # The number stays a float: rounding it first would move the steps of the size.
    num_groups = settings.max_iters - progress * (settings.max_iters - settings.min_iters)
    return equal_groups(num_layers, max(1, math.floor(num_layers / num_groups)))


def parse_adaptive(option: str | None) -> AdaptiveSettings:
    """The settings in `min_tokens=1024,saturation=2`; what is left out has its default."""
    given: dict[str, int | float] = {}
    for part in [] if option is None else option.split(","):
        name, _, text = part.partition("=")
        if name not in ADAPTIVE_PATTERNS or name in given:
            problem = "is given twice" if name in given else "is not known"
            raise _bad_adaptive(option, f"{name!r} {problem}; set {', '.join(ADAPTIVE_PATTERNS)} once each")
        if ADAPTIVE_PATTERNS[name].fullmatch(text) is None:
            number = "a number like 3 or 2.5" if name == "saturation" else "a whole number from 1 to 99999999"
            raise _bad_adaptive(option, f"{name} is {text!r}; give {number}")
        given[name] = float(text) if name == "saturation" else int(text)
    settings = AdaptiveSettings(**given)  # type: ignore[arg-type]
    if settings.saturation < SATURATION_MIN:
        raise _bad_adaptive(option, f"saturation is {settings.saturation:g}; give at least {SATURATION_MIN}")
    if settings.min_iters > settings.max_iters:
        raise _bad_adaptive(
            option, f"min_iters is {settings.min_iters}; give at most max_iters, {settings.max_iters}"
        )
    return settings


def _bad_adaptive(option: str | None, problem: str) -> ConfigError:
    return ConfigError(f"overlap policy 'adaptive:{option}': {problem}")


def _why_fixed(num_layers: int, num_tokens: int, option: str | None) -> str:
    return f"a group has {option} layers, and there are {num_layers}"


def _why_adaptive(num_layers: int, num_tokens: int, option: str | None) -> str:
    settings = parse_adaptive(option)
    if num_layers <= SHALLOW_LAYERS_MAX:
        return f"{num_layers} layers are not split, only more than {SHALLOW_LAYERS_MAX}"
    if num_tokens < settings.min_tokens:
        return f"a prompt of {num_tokens} tokens is shorter than min_tokens, {settings.min_tokens}"
    return f"for {num_tokens} tokens the settings ask for one group"


POLICIES = {
    "adaptive": GroupPolicy("adaptive", adaptive_groups, _why_adaptive),
    "fixed": GroupPolicy("fixed:N", fixed_groups, _why_fixed),
    "off": GroupPolicy("off", off_groups, lambda num_layers, num_tokens, option: "layers are not grouped"),
}
