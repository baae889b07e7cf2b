"""How an instance is started, and the sizes that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.engine.attention.pools import DTYPES
from baton.engine.checkpoint import Checkpoint, open_checkpoint
from baton.engine.model.build import Architecture, describe, missing
from baton.errors import ConfigError
from baton.plan import Cache, Layout, parse_layout
from baton.plan.dtypes import item_bytes
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack
from baton.plan.overlap import LayerTimes, choose

POOL_BYTES_DEFAULT = 512 << 20
"""Of cache on all ranks of a dp group together, where no pool size is given."""
STATE_SLOTS_DEFAULT = 64


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """What a user says of an instance; what is left out is derived and printed."""

    model: str
    layout: str = "tp1"
    name: str = "instance"
    role: str = "both"
    secret: bytes = field(default=b"", repr=False)
    dtype: str = "fp32"
    device: str = "cpu"
    page_tokens: int = 16
    pool_tokens: int = 0
    """Tokens that the cache of a dp group holds; 0: as many as POOL_BYTES_DEFAULT takes."""
    context_max: int = 0
    """Prompt and answer together; 0: what the model and the pool allow."""
    chunk_tokens: int = 512
    """Prompts are prefilled in pieces of at most so many tokens."""
    sequences_max: int = 64
    num_threads: int = 0
    """Of each rank; 0: the machine's cores over the ranks."""
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    policy: str = "cost"
    host: str = "127.0.0.1"
    registry: str | None = None
    embed_registry: int | None = None
    has_prefix_cache: bool = True
    is_warmed: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an instance will take, derived before anything is started."""

    layout: Layout
    cache: Cache
    architecture: Architecture
    checkpoint: Checkpoint
    num_pages: Mapping[str, int]
    context_max: int
    num_threads: int
    model: str
    """Where ranks find the checkpoint: it is fetched once, here."""

    def lines(self) -> list[str]:
        """What a user is told at the start."""
        pages = ", ".join(f"{count} {group}" for group, count in sorted(self.num_pages.items()))
        return [
            f"{self.layout.num_ranks} ranks ({self.layout}), {self.num_threads} threads each",
            f"pages per dp group: {pages}; context up to {self.context_max} tokens",
        ]


def derive(config: InstanceConfig) -> Sizes:
    """Everything that can be known, and refused, before a process is started."""
    layout = parse_layout(config.layout)
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"dtype {config.dtype!r} is not one the engine computes in; use {', '.join(DTYPES)}"
        )
    for name in ("page_tokens", "chunk_tokens", "sequences_max"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it has to be at least 1")
    choose(config.policy, LayerTimes((0.0,), (0.0,), 0.0), 1)
    checkpoint = open_checkpoint(config.model)
    missing(checkpoint)
    cache = stack((read_config(checkpoint.config, f"model {config.model}"),))
    layout.stages(cache.num_layers, "this")
    pool_tokens = config.pool_tokens or _pool_tokens(cache, config.dtype)
    architecture = describe(checkpoint.config, config.context_max or None)
    context_max = min(config.context_max or architecture.max_positions, pool_tokens)
    # With dealt tokens a page id stands for a page on every cp rank.
    num_dealt = layout.size("cp") if layout.scheme.num_shares(layout.size("cp")) > 1 else 1
    pages = -(-pool_tokens // (config.page_tokens * num_dealt))
    num_pages = {group: STATE_SLOTS_DEFAULT if _is_state(cache, group) else pages for group in cache.groups}
    num_threads = config.num_threads or max(1, (os.cpu_count() or 1) // layout.num_ranks)
    model = str(checkpoint.path) if checkpoint.path is not None else config.model
    return Sizes(layout, cache, architecture, checkpoint, num_pages, context_max, num_threads, model)


def _is_state(cache: Cache, group: str) -> bool:
    return all(not each.extent.has_tokens for each in cache.components if each.group == group)


def _pool_tokens(cache: Cache, dtype: str) -> int:
    token_bytes = sum(
        _num_layers(each) * each.num_units * each.num_elements * item_bytes(each.dtype or dtype)
        for each in cache.components
        if each.extent.has_tokens
    )
    return max(1024, POOL_BYTES_DEFAULT // max(1, token_bytes))


def _num_layers(component: Any) -> int:
    return sum(stop - start for start, stop in component.layers)
