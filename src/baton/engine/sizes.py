"""The sizes that follow from an instance's settings, derived and refused before a process is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from baton import settings
from baton.engine.checkpoint import open_checkpoint
from baton.engine.config import EngineConfig, EngineSizes, check_config
from baton.engine.models.build import describe, missing
from baton.engine.pages import engine_storage
from baton.errors import ConfigError
from baton.plan import Cache, Spec, parse_layout
from baton.plan.dtypes import item_bytes
from baton.plan.models.config import read_cache
from baton.plan.ownership import box, buffers
from baton.plan.ranges import Ranges, to_ids
from baton.session import SocketConfig
from baton.session.registry import RegistryError, check_instance, check_registry, check_url

POOL_BYTES_DEFAULT = 512 << 20
"""KV cache on all ranks of a dp group together, if no pool size is given."""
STATE_SLOTS_MIN, STATE_SLOTS_MAX = 4, 64
"""Slots for recurrent state, if their number is not given."""
STAGING_BYTES_MAX = {"cpu": 4 << 30, "cuda": 256 << 20}
"""Of a rank, if staging_mb is not given. The host commits its memory when it is first used, a GPU at once."""


def find_device(device: str) -> str:
    """The device that `auto` stands for here; others are themselves."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def derive_sizes(config: EngineConfig, *, is_checked: bool = False) -> EngineSizes:
    """Derives, and refuses, everything that can be known before a process is started.

    `is_checked`: these settings and the checkpoint's tensors were checked before, for the whole instance.
    """
    config = replace(config, device=find_device(config.device))
    if not is_checked:
        check_config(config)
        check_machine(config)
    layout = parse_layout(config.layout)
    checkpoint = open_checkpoint(config.model)
    if not is_checked:
        missing(checkpoint, has_draft=config.has_draft)
    cache = read_cache(checkpoint.config, f"model {config.model}", has_draft=config.has_draft)
    if config.cache_dtype == "fp8":
        cache = _with_wide_states(cache, config.dtype)
    stages = layout.stages(cache.num_layers, "this")
    if "index_k" in cache.by_name:
        _check_stages(stages, to_ids(cache.by_name["index_k"].layers))
    storage = engine_storage(cache, config.page_tokens, config.cache_dtype, config.kv_layout)
    spec = Spec(layout, cache, storage)
    for component in cache.components:
        box(spec, component, 0, "this")  # refuses a tp that cannot divide it
    token_bytes = _entry_bytes(cache, config.cache_dtype, has_tokens=True)
    # Twice the context: half of a pool may wait for a grant, so that the longest prompt has to fit there.
    default_tokens = max(1024, POOL_BYTES_DEFAULT // max(1, token_bytes), 2 * config.context_max)
    pool_tokens = config.pool_tokens or default_tokens
    if config.context_max > pool_tokens:
        raise ConfigError(
            f"a context of {config.context_max} tokens does not fit into a KV cache of {pool_tokens}; raise "
            "pool_tokens, or ask for a shorter context"
        )
    architecture = describe(checkpoint.config, config.context_max or None)
    context_max = min(config.context_max or architecture.max_positions, pool_tokens)
    # Where cp ranks share the tokens, a page id stands for a page on every cp rank.
    num_shares = layout.size("cp") if layout.scheme.num_shares(layout.size("cp")) > 1 else 1
    num_token_pages = -(-pool_tokens // (config.page_tokens * num_shares))
    slot_bytes = _entry_bytes(cache, config.cache_dtype, has_tokens=False)
    num_slots_default = max(STATE_SLOTS_MIN, min(STATE_SLOTS_MAX, POOL_BYTES_DEFAULT // max(1, slot_bytes)))
    num_slots = config.state_slots or num_slots_default
    has_tokens = {component.group for component in cache.components if component.extent.has_tokens}
    num_pages = {group: num_token_pages if group in has_tokens else num_slots for group in cache.groups}
    num_threads = config.num_threads or settings.default_threads(layout.num_ranks)
    model = str(checkpoint.path) if checkpoint.path is not None else config.model
    spec = Spec(layout, cache, storage.with_pages(num_pages))
    return EngineSizes(
        layout=layout,
        cache=cache,
        architecture=architecture,
        checkpoint=checkpoint,
        num_pages=num_pages,
        context_max=context_max,
        num_threads=num_threads,
        spec=spec,
        staging_bytes=config.staging_mb << 20 or _staging_bytes(spec, config.device),
        model=model,
    )


def check_machine(config: EngineConfig) -> None:
    """Raises ConfigError on a device that is not here, and on addresses that cannot be."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU; use cpu")
    SocketConfig(config.host, config.port)
    if config.registry is not None:
        check_registry(config.registry)
    try:
        check_url(config.url)
        if config.registry is not None or config.embed_registry is not None:
            check_instance(config.name)
    except RegistryError as error:
        raise ConfigError(str(error)) from None


def _staging_bytes(spec: Spec, device: str) -> int:
    """Room on any rank for all that its pages hold, in the widest dtype that a source may send.

    A request has its pages before it is given staging, so no prompt waits for staging within the limit.
    """
    widest = Spec(spec.layout, spec.cache, replace(spec.storage, dtype="fp32"))
    pool_bytes = max(sum(buffers(widest, rank, "this").values()) for rank in range(spec.layout.num_ranks))
    return min(pool_bytes, STAGING_BYTES_MAX[device])


def _check_stages(stages: Ranges, indexed: Sequence[int]) -> None:
    """Raises ConfigError where a stage begins with a layer that needs what an earlier stage has chosen."""
    for first, _ in stages:
        if first not in indexed:
            near = max(layer for layer in indexed if layer < first)
            raise ConfigError(
                f"a pipeline stage begins with layer {first}, which shares the indexer of layer {near}; "
                "give the sizes of the stages (pp2:3-5) so that it begins there"
            )


def _with_wide_states(cache: Cache, dtype: str) -> Cache:
    """The cache with recurrent state in `dtype`: its rounding adds up over a sequence, unlike a token's."""
    components = [
        each if each.extent.has_tokens else replace(each, dtype=each.dtype or dtype)
        for each in cache.components
    ]
    return replace(cache, components=tuple(components))


def _entry_bytes(cache: Cache, dtype: str, *, has_tokens: bool) -> int:
    """The size of a token, or of a sequence's state, on all layers."""
    return sum(
        sum(stop - start for start, stop in component.layers)
        * component.num_units
        * component.num_elements
        * item_bytes(component.dtype or dtype)
        for component in cache.components
        if component.extent.has_tokens == has_tokens
    )
