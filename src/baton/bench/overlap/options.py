"""What is measured: a model between two layouts, by prompt length, link speed and policy."""

from __future__ import annotations

from dataclasses import dataclass

from baton.bench.handoff.scene import parse_speed
from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.plan.overlap import LayerTimes, choose

AUTO = "auto"
FULL = "full"
OFF = "off"
COST = "cost"


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    model: str
    prefill: str
    decode: str
    tokens: tuple[int, ...]
    links: tuple[str, ...]
    """Speeds of a source rank's link; `auto`: the longest prompt crosses in the time it is computed in."""
    policies: tuple[str, ...]
    dtype: str = "fp32"
    device: str = "cpu"
    repeats: int = 5
    chunk_tokens: int = 0
    """Of prefill; 0: every prompt in one piece."""
    page_tokens: int = 16
    num_threads: int = 0
    transport: str = "shm"

    def __post_init__(self) -> None:
        for policy in self.policies:
            choose(policy, LayerTimes((0.0,), (0.0,), 0.0), 1)
        for link in self.links:
            speed_of(link)
        if not self.tokens or min(self.tokens) < 2:
            raise ConfigError(f"prompts of {self.tokens} tokens; give lengths of at least 2, like 1024,4096")

    @property
    def tokens_max(self) -> int:
        """The longest prompt."""
        return max(self.tokens)

    @property
    def runs(self) -> tuple[str, ...]:
        """The policies that are run: `off` always is, since its transfer time is what others are held to."""
        return tuple(dict.fromkeys((OFF, *self.policies)))

    def instance(self, role: str, secret: bytes, link_bytes_per_s: float) -> EngineConfig:
        """One side of a pair."""
        context_max = self.tokens_max + 2 * self.page_tokens
        return EngineConfig(
            model=self.model,
            layout=self.prefill if role == "prefill" else self.decode,
            name=role,
            role=role,
            secret=secret,
            dtype=self.dtype,
            device=self.device,
            page_tokens=self.page_tokens,
            # A source may lend half of its pool before it is granted.
            pool_tokens=2 * context_max + 8 * self.page_tokens,
            context_max=context_max,
            chunk_tokens=self.chunk_tokens or context_max,
            num_threads=self.num_threads,
            transport=self.transport,
            link_bytes_per_s=link_bytes_per_s,
        )


def speed_of(link: str) -> float | None:
    """Bytes per second; 0 where nothing holds the transport back, None where it is to be found."""
    if link == AUTO:
        return None
    return 0.0 if link == FULL else parse_speed(link)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Prompt lengths of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None:
        raise ConfigError(f"prompt length {wrong!r} is no number of tokens; write lengths like 1024,4096")
    return tuple(dict.fromkeys(int(part) for part in parts))
