"""What is asked of an endpoint: how many requests, when, how long, and what counts as served well."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from baton.errors import ConfigError

_TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s)")
SLO_NAMES = ("ttft", "itl", "tpot", "tth", "e2e")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens: one, or any of low to high, both included, alike often."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def parse_lengths(text: str) -> Lengths:
    """`512`, or `128:1024`."""
    first, _, second = text.partition(":")
    try:
        found = Lengths(int(first), int(second or first))
    except ValueError:
        found = Lengths(0, 0)
    if not 1 <= found.low <= found.high:
        raise ConfigError(f"length {text!r} cannot be used; write it like 512, or 128:1024 for a range")
    return found


def parse_rate(text: str) -> float:
    """Requests a second; `inf`: all at once."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ConfigError(f"rate {text!r} cannot be used; give requests a second above 0, or inf")
    return rate


def parse_time(text: str) -> float:
    """Seconds of `200ms` or `1.5s`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"time {text!r} cannot be read; write it with its unit, like 200ms or 1.5s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that a request has to keep, each of them, to count as served well."""

    bounds: tuple[tuple[str, float], ...]
    """By name of a figure, in seconds."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {bound_s * 1e3:g} ms" for name, bound_s in self.bounds)


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,itl=50ms`: itl bounds every gap of a request, tpot their mean."""
    bounds = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in SLO_NAMES or name in bounds:
            raise ConfigError(
                f"slo {part!r} cannot be used; give each of {', '.join(SLO_NAMES)} at most once, "
                "like ttft=500ms,itl=50ms"
            )
        bounds[name] = parse_time(value)
    return Slo(tuple(bounds.items()))


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run."""

    num_requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    rate: float = math.inf
    """Poisson arrivals a second; inf: all wish to be sent at once."""
    concurrency: int = 0
    """Requests in flight at most; 0: no bound."""
    num_shared: int = 0
    """Tokens with which every prompt begins."""
    seed: int = 0
    num_warmup: int = 1
    """Requests before the measured ones, one after another, that count for nothing."""

    def __post_init__(self) -> None:
        if self.num_shared > self.input_tokens.low:
            raise ConfigError(
                f"a shared prefix of {self.num_shared} tokens does not fit prompts of {self.input_tokens}; "
                "make it shorter, or --input-tokens longer"
            )

    @property
    def is_open(self) -> bool:
        """Whether requests arrive on their own, however slowly they are answered."""
        return math.isfinite(self.rate)

    def __str__(self) -> str:
        when = f"{self.rate:g} requests/s (Poisson)" if self.is_open else "as fast as answered"
        bound = f", at most {self.concurrency} at once" if self.concurrency else ""
        return (
            f"{self.num_requests} requests, {when}{bound}, {self.input_tokens} in, {self.output_tokens} out"
        )
