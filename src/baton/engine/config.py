"""How an instance is started. Nothing here imports torch: bad settings are refused within a moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baton.checkpoint.configs import read_model_config
from baton.checkpoint.names import (
    DUMMY,
    GENERATION,
    KV_DTYPES,
    TORCH_DTYPES,
    check_dtype,
    check_model,
    find_dtype,
    find_model,
    read_object,
)
from baton.engine.models.config import ModelFields
from baton.engine.pages import KV_LAYOUTS, PageGeometry, engine_storage
from baton.engine.sampling_params import sampling_defaults
from baton.errors import ConfigError, LayoutError
from baton.plan import Cache, Layout, Spec, parse_layout
from baton.plan.models.config import read_cache
from baton.plan.overlap import LayerTimes, choose
from baton.plan.ownership import cuts
from baton.protocol.instance import PACKING, ROLES
from baton.protocol.timings import Timings
from baton.settings import Tls, check_registry
from baton.transport import (
    Place,
    Reach,
    capabilities_of,
    check_library,
    parse_transport,
)

if TYPE_CHECKING:
    from baton.checkpoint.base import Checkpoint
    from baton.engine.models.build import Architecture

SILENCE_S_MIN = 4 * Timings().beat_s
DEVICES = ("auto", "cpu", "cuda")
GENERATION_CONFIGS = ("auto", "none")
WORKER_MODULES = ("baton.engine.worker",)
"""What the fork server of workers imports."""
DUMMY_MODULES = ("transformers.activations",)
"""And for random weights: it brings what the models of `transformers` import, which give their shapes."""


def worker_modules(model: str) -> tuple[str, ...]:
    """What the fork server of a model's workers imports."""
    return (*WORKER_MODULES, *DUMMY_MODULES) if model.startswith(DUMMY) else WORKER_MODULES


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an instance; what is left out is derived and printed."""

    model: str
    layout: str = "tp1"
    name: str = "instance"
    role: str = "both"
    secret: bytes = field(default=b"", repr=False)
    dtype: str = "auto"
    """Of weights and activations: fp32, bf16 or fp16 (or torch's names); auto: as the checkpoint says."""
    kv_cache_dtype: str = ""
    """Of the KV cache, fp8 (e4m3) too; empty: `dtype`. Where prefill and decode differ, the hand-over
    converts."""
    kv_layout: str = ""
    """How pages are stored, one of KV_LAYOUTS; empty: K and V fused where their rows have one size."""
    device: str = "cpu"
    """cpu, cuda, or auto: cuda where torch sees a GPU."""
    generation_config: str = "auto"
    """Sampling defaults: auto takes those of the checkpoint's generation_config.json, none OpenAI's."""
    page_tokens: int = 16
    pool_tokens: int = 0
    """Tokens that the KV cache of a dp group holds. 0: on a GPU what `gpu_memory_utilization` leaves room
    for; otherwise what fits into POOL_BYTES_DEFAULT, and at least two contexts if `context_max` is given."""
    gpu_memory_utilization: float = 0.9
    """The share of each GPU that the ranks of this instance take: weights, workspace and KV cache."""
    base_gpu_id: int = 0
    """The GPU of rank 0; the other ranks take the next ones."""
    state_slots: int = 0
    """Sequences whose recurrent state is kept at once, those whose hand-over waits too; 0: what fits into
    POOL_BYTES_DEFAULT, up to 64 or `sequences_max`."""
    context_max: int = 0
    """Prompt and answer together; 0: what the model and the pool allow."""
    chunk_tokens: int = 512
    """Prompts are prefilled in chunks of at most this many tokens."""
    sequences_max: int = 64
    queue_max: int = 0
    """Requests that may wait; more are refused. 0: no limit."""
    queue_s_max: float = 0.0
    """How long a request may wait before it is computed, or has pages for its KV cache. 0: no limit."""
    num_threads: int = 0
    """Of each rank; 0: the machine's cores divided by the ranks."""
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    policy: str = "cost"
    staging_mb: int = 0
    """Of each rank, to convert KV caches in; 0: room for every token of the rank's KV cache, up to
    STAGING_BYTES_MAX. A prompt that is converted needs room for all of it at the target."""
    packing: str = "convert"
    """When staging is used: `convert`, to change the dtype; `cost`, also instead of many small copies. Not
    `cost` as in the library, where only those who ask for it have staging: every instance has some."""
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
    silence_s: float = Timings().silence_s
    """How long a rank or a peer may be silent before it counts as lost; that it ended is seen at once."""
    progress_s: float = Timings().progress_s
    """How long a hand-over may go without progress before it fails."""
    total_s: float = Timings().total_s
    """How long a hand-over may take, with the prefill that it follows."""
    ungranted_share_max: float = 0.5
    """The share of the pool that prompts may hold at prefill before decode has pages for them."""
    growth_tokens: int = 512
    """Further tokens of every running answer that decode keeps room for when it takes a prompt; 0: none, so
    that a full pool preempts answers."""
    has_endpoint_process: bool | None = None
    """Whether the endpoint of each rank runs in a process of its own, beside the worker; None: on a GPU."""
    has_prefix_cache: bool = True
    is_warmed: bool = True
    draft_tokens: int = 0
    """How many tokens the model's own draft layer guesses ahead in a step; 0: it is not run."""

    @property
    def has_draft(self) -> bool:
        """Whether the draft layer runs; a target that runs it needs a source that does."""
        return self.draft_tokens > 0

    @property
    def is_offloaded(self) -> bool:
        """Whether the endpoint runs in a process of its own."""
        if self.has_endpoint_process is None:
            return self.device == "cuda" and _can_offload(parse_transport(self.transport)[0])
        return self.has_endpoint_process

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            given = getattr(self, name)
            known = TORCH_DTYPES.get(given, given)
            if name == "kv_cache_dtype":
                known = {"auto": "", "fp8_e4m3": "fp8"}.get(given, known)
            object.__setattr__(self, name, find_dtype(self.model) if known == "auto" else known)

    @property
    def cache_dtype(self) -> str:
        """The dtype that the KV cache is stored in."""
        return self.kv_cache_dtype or self.dtype

    def timings(self) -> Timings:
        """Of control links and hand-overs; raises ConfigError on deadlines that cannot be."""
        return Timings(silence_s=self.silence_s, progress_s=self.progress_s, total_s=self.total_s)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker; the same for all workers of an instance but for `rank`."""

    engine: EngineConfig
    """With a secret, and with the model under the path or name that it was found by."""
    eos_ids: tuple[int, ...]
    tokenizer: str = ""
    """As in tokenizer.json; empty where the model has none."""
    rank: int = 0
    rendezvous: str = ""
    """A path at which torch.distributed connects the ranks of the instance."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What an instance will use, derived before anything is started."""

    layout: Layout
    cache: Cache
    architecture: Architecture
    checkpoint: Checkpoint
    num_pages: Mapping[str, int]
    pool_tokens: int
    """That the KV cache of a dp group holds."""
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
        cache = self.spec.cache
        has_tokens = {component.group for component in cache.components if component.extent.has_tokens}
        unit = dict.fromkeys(has_tokens, f"pages of {self.spec.storage.page_tokens} tokens")
        of_group = {group: f" ({group})" for group in self.num_pages if len(self.num_pages) > 1}
        pages = ", ".join(
            f"{count} {unit.get(group, 'slots')}{of_group.get(group, '')}"
            for group, count in sorted(self.num_pages.items())
        )
        lines = [
            f"{self.layout.num_ranks} ranks ({self.layout}), {self.num_threads} threads each",
            f"KV cache of {self.pool_tokens} tokens per dp group: {pages}; context up to "
            f"{self.context_max} tokens",
        ]
        # The reason does not depend on the page size.
        reason = PageGeometry(self.layout, self.cache, 1).why_no_prefix
        return [*lines, f"prefixes are not kept: {reason}"] if reason else lines


def check_config(config: EngineConfig) -> None:
    """Raises on values that cannot be, or that do not fit the model's config, whatever the machine."""
    parse_layout(config.layout)
    check_model(config.model)
    check_dtype(config.dtype)
    if config.cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype!r} is not supported; use auto (that of --dtype), "
            "bfloat16, float16, float32 or fp8"
        )
    if config.kv_layout and config.kv_layout not in KV_LAYOUTS:
        raise ConfigError(f"kv_layout {config.kv_layout!r} is not known; use {' or '.join(KV_LAYOUTS)}")
    if config.staging_mb < 0:
        raise ConfigError(f"staging_mb is {config.staging_mb}; give a count from 0 (0: derived)")
    if config.packing not in PACKING:
        raise ConfigError(f"packing {config.packing!r} is not known; use {' or '.join(PACKING)}")
    for name in ("page_tokens", "chunk_tokens", "sequences_max"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it has to be at least 1")
    if config.state_slots < 0:
        raise ConfigError(f"state_slots is {config.state_slots}; give a count from 0 (0: derived)")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}; give a share in (0, 1]"
        )
    if config.base_gpu_id < 0:
        raise ConfigError(f"base_gpu_id is {config.base_gpu_id}; give the number of a GPU, from 0")
    if config.growth_tokens < 0:
        raise ConfigError(f"growth_tokens is {config.growth_tokens}; give a count from 0 (0: no room)")
    if config.queue_s_max < 0:
        raise ConfigError(f"queue_s_max is {config.queue_s_max:g}; give seconds above 0 (0: no limit)")
    if config.queue_max < 0:
        raise ConfigError(f"queue_max is {config.queue_max}; give a count from 0 (0: any number)")
    if not SILENCE_S_MIN <= config.silence_s < math.inf:
        raise ConfigError(
            f"silence_s is {config.silence_s}; give at least {SILENCE_S_MIN:g} s, several heartbeats of "
            "ranks and peers"
        )
    config.timings()
    if not 0 < config.ungranted_share_max <= 1:
        raise ConfigError(f"ungranted_share_max is {config.ungranted_share_max}; give a share in (0, 1]")
    name, _ = parse_transport(config.transport)
    check_library(name)
    if config.device not in DEVICES:
        raise ConfigError(f"device {config.device!r} is not known; use auto, cpu or cuda")
    if config.generation_config not in GENERATION_CONFIGS:
        raise ConfigError(
            f"generation_config {config.generation_config!r} is not known; use "
            f"{' or '.join(GENERATION_CONFIGS)}"
        )
    folder = find_model(config.model) if config.generation_config == "auto" else None
    if folder is not None and (folder / GENERATION).is_file():
        sampling_defaults(read_object(folder / GENERATION), 1)  # which no default depends on
    check_memory(config)
    if config.has_endpoint_process and not _can_offload(name):
        raise ConfigError(
            f"transport {name} cannot run in a process beside the worker, which has the memory; use shm, or "
            "leave the endpoint in the worker (--no-endpoint-process)"
        )
    if config.role not in ROLES:
        raise ConfigError(f"role {config.role!r} is not known; use {', '.join(ROLES)}")
    if config.registry is not None:
        check_registry(config.registry)
    if config.tls is not None:
        config.tls.dialling()  # reads the files
    choose(config.policy, LayerTimes((0.0,), (0.0,), 0.0), 1)
    model = read_model_config(config.model)
    if model is not None:
        cache_spec(config, model)
        ModelFields(f"config of a {model['model_type']} model", model).check_context(config.context_max)
    if 0 < config.pool_tokens < config.context_max:
        raise ConfigError(
            f"a context of {config.context_max} tokens does not fit into a KV cache of {config.pool_tokens}; "
            "raise pool_tokens, or ask for a shorter context"
        )


def cache_spec(config: EngineConfig, model: Mapping[str, Any]) -> Spec:
    """The layout, and the KV cache of a model with this config, without the sizes of pools.

    Raises LayoutError where the layout cannot divide its layers or heads.
    """
    cache = read_cache(model, f"model {config.model}", has_draft=config.has_draft)
    if config.cache_dtype == "fp8":
        cache = _with_wide_states(cache, config.dtype)
    storage = engine_storage(cache, config.page_tokens, config.cache_dtype, config.kv_layout)
    spec = Spec(parse_layout(config.layout), cache, storage)
    for component in cache.components:
        try:
            cuts(spec, component, "layout")
        except LayoutError as error:
            raise LayoutError(error.reason, sides=error.sides) from None
    return spec


def _with_wide_states(cache: Cache, dtype: str) -> Cache:
    """The cache with recurrent state in `dtype`: its rounding adds up over a sequence, unlike a token's."""
    components = [
        component if component.extent.has_tokens else replace(component, dtype=component.dtype or dtype)
        for component in cache.components
    ]
    return replace(cache, components=tuple(components))


def check_memory(config: EngineConfig) -> None:
    """Raises ConfigError on a transport that does not move the device's memory; says nothing of `auto`."""
    name, _ = parse_transport(config.transport)
    places = capabilities_of(name).places
    if config.device == "cpu" and Place.HOST not in places:
        raise ConfigError(f"transport {name} moves CUDA memory; use shm with device {config.device!r}")
    if config.device == "cuda" and Place.CUDA not in places:
        raise ConfigError(
            f"transport {name} does not move CUDA memory; use shm or cuda_ipc on one host, mooncake between "
            "hosts, or device cpu"
        )


def _can_offload(transport: str) -> bool:
    """Whether a transport can run in a process beside the worker."""
    capabilities = capabilities_of(transport)
    return capabilities.reach is not Reach.PROCESS and not capabilities.needs_own_memory
