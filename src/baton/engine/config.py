"""How an instance is started, and the sizes that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from baton import settings
from baton.engine.attention.pools import DTYPES
from baton.engine.checkpoint import Checkpoint, open_checkpoint
from baton.engine.models.build import Architecture, describe, missing
from baton.engine.pages import PageGeometry, engine_storage
from baton.errors import ConfigError
from baton.plan import Cache, Layout, Spec, parse_layout
from baton.plan.dtypes import item_bytes
from baton.plan.models.config import read_cache
from baton.plan.overlap import LayerTimes, choose
from baton.plan.ownership import box, buffers
from baton.session import SocketConfig, Timings
from baton.session.endpoint import PACKING, ROLES
from baton.session.registry import RegistryError, check_instance, check_registry, check_url
from baton.settings import Tls
from baton.transport import parse_transport, transport_names

POOL_BYTES_DEFAULT = 512 << 20
"""KV cache on all ranks of a dp group together, if no pool size is given."""
STATE_SLOTS_MIN, STATE_SLOTS_MAX = 4, 64
"""Slots for recurrent state, if their number is not given."""
STAGING_BYTES_MAX = {"cpu": 4 << 30, "cuda": 256 << 20}
"""Of a rank, if staging_mb is not given. The host commits its memory when it is first used, a GPU at once."""
SILENCE_S_MIN = 4 * Timings().beat_s
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an instance; what is left out is derived and printed."""

    model: str
    layout: str = "tp1"
    name: str = "instance"
    role: str = "both"
    secret: bytes = field(default=b"", repr=False)
    dtype: str = "fp32"
    kv_cache_dtype: str = ""
    """Of the KV cache; empty: `dtype`. Where prefill and decode differ, the hand-over converts."""
    kv_layout: str = ""
    """How pages are stored, one of KV_LAYOUTS; empty: K and V fused where their rows have one size."""
    device: str = "cpu"
    page_tokens: int = 16
    pool_tokens: int = 0
    """Tokens that the KV cache of a dp group holds; 0: as many as fit into POOL_BYTES_DEFAULT, and at least
    two contexts where `context_max` is given."""
    state_slots: int = 0
    """Sequences whose recurrent state is kept at once; 0: what fits into POOL_BYTES_DEFAULT, up to 64."""
    context_max: int = 0
    """Prompt and answer together; 0: what the model and the pool allow."""
    chunk_tokens: int = 512
    """Prompts are prefilled in chunks of at most this many tokens."""
    sequences_max: int = 64
    queue_max: int = 0
    """Requests that may wait; more are refused. 0: no limit."""
    num_threads: int = 0
    """Of each rank; 0: the machine's cores divided by the ranks."""
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    policy: str = "cost"
    staging_mb: int = 0
    """Of each rank, to convert KV caches in; 0: room for every token of the rank's KV cache, up to
    STAGING_BYTES_MAX. A prompt that is converted needs room for all of it at the target."""
    packing: str = "convert"
    """When staging is used: `convert`, to change the dtype; `cost`, also instead of many small copies."""
    is_verified: bool = False
    """Whether the KV cache that this instance receives is checked by checksums."""
    host: str = "127.0.0.1"
    port: int = 0
    """The coordinator's; 0 takes any free one."""
    tls: Tls | None = None
    """Of control links and towards the registry."""
    url: str = ""
    """Where the instance serves HTTP, as the registry publishes it; empty: nowhere."""
    registry: str | None = None
    embed_registry: int | None = None
    silence_s: float = Timings().silence_s
    """How long a rank or a peer may be silent before it counts as lost; that it ended is seen at once."""
    progress_s: float = Timings().progress_s
    """How long a hand-over may go without progress before it fails."""
    ungranted_share_max: float = 0.5
    """The share of the pool that prompts may hold at prefill before decode has pages for them."""
    has_endpoint_process: bool | None = None
    """Whether the endpoint of each rank runs in a process of its own, beside the worker; None: on a GPU."""
    has_prefix_cache: bool = True
    is_warmed: bool = True
    has_draft: bool = False
    """Whether the model's own draft layer guesses a token ahead; both sides of a hand-over agree on it."""

    @property
    def is_offloaded(self) -> bool:
        """Whether the endpoint runs in a process of its own."""
        if self.has_endpoint_process is None:
            return self.device == "cuda" and not self.transport.startswith("cuda_ipc")
        return self.has_endpoint_process

    @property
    def cache_dtype(self) -> str:
        """The dtype that the KV cache is stored in."""
        return self.kv_cache_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker; the same for all workers of an instance but for `rank`."""

    engine: EngineConfig
    """With a secret, and with the model under the path or name that it was found by."""
    rank: int
    rendezvous: str
    """A path at which torch.distributed connects the ranks of the instance."""
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What an instance will use, derived before anything is started."""

    layout: Layout
    cache: Cache
    architecture: Architecture
    checkpoint: Checkpoint
    num_pages: Mapping[str, int]
    context_max: int
    num_threads: int
    spec: Spec
    """The layout and the KV cache as peers see them."""
    staging_bytes: int
    """Of each rank."""
    model: str
    """The path or name under which ranks open the checkpoint; it is fetched once, here."""

    def lines(self) -> list[str]:
        """What the user is shown at the start."""
        pages = ", ".join(f"{count} {group}" for group, count in sorted(self.num_pages.items()))
        lines = [
            f"{self.layout.num_ranks} ranks ({self.layout}), {self.num_threads} threads each",
            f"pages per dp group: {pages}; context up to {self.context_max} tokens",
        ]
        # The reason does not depend on the page size.
        reason = PageGeometry(self.layout, self.cache, 1).why_no_prefix
        return [*lines, f"prefixes are not kept: {reason}"] if reason else lines


def derive_sizes(config: EngineConfig, *, is_checked: bool = False) -> EngineSizes:
    """Derives, and refuses, everything that can be known before a process is started.

    `is_checked`: these settings and the checkpoint's tensors were checked before, for the whole instance.
    """
    layout = parse_layout(config.layout)
    if not is_checked:
        check_config(config)
    checkpoint = open_checkpoint(config.model)
    if not is_checked:
        missing(checkpoint, has_draft=config.has_draft)
    cache = read_cache(checkpoint.config, f"model {config.model}", has_draft=config.has_draft)
    layout.stages(cache.num_layers, "this")
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


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError on values that only a rank would notice."""
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"dtype {config.dtype!r} is not one the engine computes in; use {', '.join(DTYPES)}"
        )
    if config.cache_dtype not in DTYPES:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} is not one the engine computes on; use "
            f"{', '.join(DTYPES)}, or leave it out for the dtype of the weights"
        )
    if config.staging_mb < 0:
        raise ConfigError(f"staging_mb is {config.staging_mb}; give a count from 0 (0: derived)")
    if config.packing not in PACKING:
        raise ConfigError(f"packing {config.packing!r} is not known; use {' or '.join(PACKING)}")
    for name in ("page_tokens", "chunk_tokens", "sequences_max"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it has to be at least 1")
    if config.state_slots < 0:
        raise ConfigError(f"state_slots is {config.state_slots}; give a count from 0 (0: derived)")
    if config.queue_max < 0:
        raise ConfigError(f"queue_max is {config.queue_max}; give a count from 0 (0: any number)")
    if not SILENCE_S_MIN <= config.silence_s < math.inf:
        raise ConfigError(
            f"silence_s is {config.silence_s}; give at least {SILENCE_S_MIN:g} s, several heartbeats of "
            "ranks and peers"
        )
    Timings(progress_s=config.progress_s)
    if not 0 < config.ungranted_share_max <= 1:
        raise ConfigError(f"ungranted_share_max is {config.ungranted_share_max}; give a share in (0, 1]")
    name, _ = parse_transport(config.transport)
    if name not in transport_names():
        raise ConfigError(f"transport {name!r} is not known; use {', '.join(transport_names())}")
    if config.device not in DEVICES:
        raise ConfigError(f"device {config.device!r} is not known; use {' or '.join(DEVICES)}")
    if config.has_endpoint_process and name in ("cuda_ipc", "memory"):
        raise ConfigError(
            f"transport {name!r} cannot run in a process of its own: the memory that it hands out is the "
            "worker's; use shm, or leave the endpoint in the worker (--no-endpoint-process)"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU; use cpu")
    if config.role not in ROLES:
        raise ConfigError(f"role {config.role!r} is not known; use {', '.join(ROLES)}")
    SocketConfig(config.host, config.port)
    if config.tls is not None:
        config.tls.dialling()  # reads the files
    if config.registry is not None:
        check_registry(config.registry)
    try:
        check_url(config.url)
        if config.registry is not None or config.embed_registry is not None:
            check_instance(config.name)
    except RegistryError as error:
        raise ConfigError(str(error)) from None
    choose(config.policy, LayerTimes((0.0,), (0.0,), 0.0), 1)


def _staging_bytes(spec: Spec, device: str) -> int:
    """Room on any rank for all that its pages hold, in the widest dtype that a source may send.

    A request has its pages before it is given staging, so no prompt waits for staging within the limit.
    """
    widest = Spec(spec.layout, spec.cache, replace(spec.storage, dtype="fp32"))
    pool_bytes = max(sum(buffers(widest, rank, "this").values()) for rank in range(spec.layout.num_ranks))
    return min(pool_bytes, STAGING_BYTES_MAX[device])


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
