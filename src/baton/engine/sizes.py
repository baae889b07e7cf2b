"""The sizes that follow from an instance's settings, derived and refused before a process is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from baton import settings
from baton.checkpoint.base import Checkpoint
from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import DTYPES
from baton.engine.config import EngineConfig, EngineSizes, cache_spec, check_config, check_memory
from baton.engine.gpu_memory import (
    CONTEXT_BYTES,
    WORKSPACE_BYTES,
    GpuMemory,
    RankRoom,
    deal_gpus,
    gpu_of,
    read_gpus,
)
from baton.engine.models.build import Architecture, check_weights, describe
from baton.engine.parallel import cut_of
from baton.errors import ConfigError
from baton.plan import Cache, Spec, parse_layout
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import box, buffers
from baton.plan.printer import human_bytes
from baton.plan.ranges import Ranges, size
from baton.session import SocketConfig
from baton.session.registry import RegistryError, check_instance, check_url

POOL_BYTES_DEFAULT = 512 << 20
"""KV cache on all ranks of a dp group together, if no pool size is given and it is not on a GPU."""
CONTEXTS_MAX = 2
"""On a GPU, the KV cache that is derived holds at most this many contexts of every sequence in a step."""
STATE_SLOTS_MIN, STATE_SLOTS_MAX = 4, 64
"""Slots for recurrent state, if their number is not given; more than 64 if a step has more sequences."""
STAGING_BYTES_MAX = {"cpu": 4 << 30, "cuda": 256 << 20}
"""Of a rank, if staging_mb is not given. The host commits its memory when it is first used, a GPU at once."""
ROW_WIDTHS = 16
"""What a layer takes for a row while it computes it, in float32 vectors of the hidden size."""


def find_device(device: str) -> str:
    """The device that `auto` stands for here; others are themselves."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def place_on_gpus(configs: Sequence[EngineConfig]) -> list[EngineConfig]:
    """Instances that share this machine, each on its GPUs and with its share of their memory."""
    if {find_device(config.device) for config in configs} != {"cuda"} or not (gpus := read_gpus()):
        return list(configs)
    dealt = deal_gpus([parse_layout(config.layout).num_ranks for config in configs], len(gpus))
    return [
        replace(config, base_gpu_id=first, gpu_memory_utilization=config.gpu_memory_utilization * share)
        for config, (first, share) in zip(configs, dealt, strict=True)
    ]


def derive_sizes(config: EngineConfig, *, is_checked: bool = False) -> EngineSizes:
    """Derives, and refuses, everything that can be known before a process is started.

    `is_checked`: these settings and the checkpoint's tensors were checked before, for the whole instance, and
    `pool_tokens` is what was derived then.
    """
    config = replace(config, device=find_device(config.device))
    if not is_checked:
        check_config(config)
        check_machine(config)
    checkpoint = open_checkpoint(config.model)
    if not is_checked:
        check_weights(checkpoint, has_draft=config.has_draft)
    spec = cache_spec(config, checkpoint.config)
    layout, cache = spec.layout, spec.cache
    architecture = describe(checkpoint.config, config.context_max or None)
    if architecture.stage_starts is not None:
        _check_stages(layout.stages(cache.num_layers, "this"), architecture.stage_starts)
    pool = PoolSizes(config, spec)
    pool_tokens = config.pool_tokens
    if config.device == "cuda" and not is_checked:
        rooms = gpu_rooms(config, checkpoint, architecture, pool, read_gpus())
        pool_tokens = fit_gpus(config, architecture, pool, rooms)
    elif not pool_tokens:
        token_bytes = _entry_bytes(cache, config.cache_dtype, has_tokens=True)
        # Twice the context: half of a pool may wait for a grant, so that the longest prompt has to fit there.
        pool_tokens = max(1024, POOL_BYTES_DEFAULT // max(1, token_bytes), 2 * config.context_max)
    num_threads = config.num_threads or settings.default_threads(layout.num_ranks)
    model = str(checkpoint.path) if checkpoint.path is not None else config.model
    spec = pool.spec(pool_tokens)
    return EngineSizes(
        layout=layout,
        cache=cache,
        architecture=architecture,
        checkpoint=checkpoint,
        num_pages=pool.num_pages(pool_tokens),
        pool_tokens=pool_tokens,
        context_max=min(config.context_max or architecture.max_positions, pool_tokens),
        num_threads=num_threads,
        spec=spec,
        staging_bytes=config.staging_mb << 20 or _staging_bytes(spec, config.device),
        model=model,
    )


class PoolSizes:
    """Pages and bytes of a KV cache by the number of its tokens."""

    def __init__(self, config: EngineConfig, spec: Spec) -> None:
        self._spec = spec
        # Where cp ranks share the tokens, a page id stands for a page on every cp rank.
        num_cp = spec.layout.size("cp")
        num_shares = num_cp if spec.layout.scheme.num_shares(num_cp) > 1 else 1
        self.page_tokens = config.page_tokens * num_shares
        """Of one page id."""
        slot_bytes = _entry_bytes(spec.cache, config.cache_dtype, has_tokens=False)
        num_slots = min(max(STATE_SLOTS_MAX, config.sequences_max), POOL_BYTES_DEFAULT // max(1, slot_bytes))
        self._num_slots = config.state_slots or max(STATE_SLOTS_MIN, num_slots)

    def num_pages(self, pool_tokens: int) -> dict[str, int]:
        """By cache group; a group without tokens has slots."""
        cache = self._spec.cache
        has_tokens = {component.group for component in cache.components if component.extent.has_tokens}
        num_pages = -(-pool_tokens // self.page_tokens)
        return {group: num_pages if group in has_tokens else self._num_slots for group in cache.groups}

    def spec(self, pool_tokens: int) -> Spec:
        """The spec with pools of this size."""
        return replace(self._spec, storage=self._spec.storage.with_pages(self.num_pages(pool_tokens)))

    def num_bytes(self, pool_tokens: int, rank: int) -> int:
        """On one rank."""
        return sum(buffers(self.spec(pool_tokens), rank, "this").values())

    def page_bytes(self, rank: int) -> int:
        """What one more page takes on a rank; 0 where it holds states only."""
        return self.num_bytes(2 * self.page_tokens, rank) - self.num_bytes(self.page_tokens, rank)

    def guess_bytes(self, dtype: str, rank: int) -> int:
        """What recurrent layers keep of one guess of every slot, on a rank: their input rows in this dtype.

        Such a row has the channels of the convolution and two numbers for each head, as in Qwen3-Next and
        Qwen3.5, whose drafts are the only ones beside recurrent layers.
        """
        num_values = 0
        for component in self._spec.cache.components:
            if not component.extent.has_tokens:
                held = box(self._spec, component, rank, "this")
                width = 2 if component.name == "ssm" else component.dims[0].size
                num_values += size(held.layers) * (held.units[1] - held.units[0]) * width
        return self._num_slots * num_values * item_bytes(dtype)


def gpu_rooms(
    config: EngineConfig,
    checkpoint: Checkpoint,
    architecture: Architecture,
    pool: PoolSizes,
    gpus: Sequence[GpuMemory],
) -> list[RankRoom]:
    """What every rank may take of its GPU."""
    if not gpus:
        raise ConfigError(
            "device cuda: the driver's management library (libnvidia-ml) shows no GPU that this process may "
            "use, so that the KV cache cannot be sized; repair the driver, or use cpu"
        )
    layout = parse_layout(config.layout)
    devices = [gpu_of(config.base_gpu_id, rank, len(gpus)) for rank in range(layout.num_ranks)]
    other = CONTEXT_BYTES * (1 + config.is_offloaded) + STAGING_BYTES_MAX["cuda"] + WORKSPACE_BYTES
    # Sampling works on a few copies of the logits, in float32. Each guess is a row more, with logits.
    num_guesses = config.sequences_max * config.draft_tokens
    other += 4 * (config.sequences_max + num_guesses) * architecture.vocab_size * 4
    other += num_guesses * ROW_WIDTHS * architecture.hidden_size * 4
    context_max = config.context_max or architecture.max_positions
    weights: dict[tuple[int, int], int] = {}
    """By the layers of a stage: its first rank has the largest share."""
    rooms = []
    for rank, device in enumerate(devices):
        cut = cut_of(layout, rank, architecture.num_layers, DTYPES[config.dtype], torch.device("meta"))
        if cut.layers not in weights:
            weights[cut.layers] = check_weights(checkpoint, cut, has_draft=config.has_draft)
        # Prefill gathers the keys and values of one layer for a whole context, and computes on a copy.
        first, last = cut.layers
        gathered = 2 * context_max * pool.page_bytes(rank) // pool.page_tokens // (last - first)
        room = RankRoom(
            gpus[device],
            devices.count(device),
            config.gpu_memory_utilization,
            weights[cut.layers],
            other + config.draft_tokens * pool.guess_bytes(config.dtype, rank),
        )
        rooms.append(replace(room, other=room.other + min(gathered, max(0, room.cache_bytes) // 8)))
    return rooms


def fit_gpus(
    config: EngineConfig, architecture: Architecture, pool: PoolSizes, rooms: Sequence[RankRoom]
) -> int:
    """The tokens of the KV cache: as many as were asked for, or as many as every rank has room for."""
    wanted = config.pool_tokens or max(pool.page_tokens, 2 * config.context_max)
    most = CONTEXTS_MAX * config.sequences_max * (config.context_max or architecture.max_positions)
    for rank, room in enumerate(rooms):
        num_bytes, page_bytes = pool.num_bytes(wanted, rank), pool.page_bytes(rank)
        if num_bytes > room.cache_bytes:
            raise room.refusal(f"a KV cache of {wanted} tokens ({human_bytes(num_bytes)} on rank {rank})")
        if page_bytes:
            most = min(most, wanted + (room.cache_bytes - num_bytes) // page_bytes * pool.page_tokens)
    return config.pool_tokens or max(wanted, most // pool.page_tokens * pool.page_tokens)


def check_machine(config: EngineConfig) -> None:
    """Raises ConfigError on a device that is not here, and on addresses that cannot be."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU; use cpu")
    check_memory(replace(config, device=find_device(config.device)))
    SocketConfig(config.host, config.port)
    try:
        check_url(config.url)
        if config.registry is not None:
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


def _check_stages(stages: Ranges, starts: Sequence[int]) -> None:
    """Raises ConfigError where a stage begins with a layer that needs what an earlier stage has computed."""
    for first, _ in stages:
        if first not in starts:
            near = max(layer for layer in starts if layer < first)
            raise ConfigError(
                f"a pipeline stage begins with layer {first}, which needs what layer {near} has computed; "
                "give the sizes of the stages (pp2:3-5) so that it begins there"
            )


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
