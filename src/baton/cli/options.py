"""Options that several commands have."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from operator import not_
from pathlib import Path
from typing import Literal, TypeAlias

from baton import settings
from baton.cli.logs import Form, Level
from baton.cli.parser import argument, flag, like, option
from baton.errors import ConfigError
from baton.settings import Tls
from baton.units import parse_speed

RouterPolicy: TypeAlias = Literal["least_loaded", "prefix_aware", "round_robin"]
"""Those of baton.serving.policies, whose import would keep --help waiting."""
Side: TypeAlias = Literal["prefill", "decode"]
Local: TypeAlias = Literal["auto", "never", "always"]
Engine: TypeAlias = Literal["baton", "vllm"]
ToolCallParser: TypeAlias = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "mistral",
    "openai",
    "glm45",
    "qwen3_coder",
    "hermes",
    "llama3_json",
    "pythonic",
]
"""Those of baton.serving.tool_calls."""
NUM_INSTANCES_MAX = 64

MODEL = option(
    MISSING,
    "MODEL",
    "checkpoint folder, id of a model in the Hugging Face cache (org/name), .gguf file, demo, or dummy:CARD",
)
TRANSPORT = option("shm", "NAME", "KV transfer transport: NAME or NAME:OPTION=VALUE")
LINK = option(
    None,
    "SPEED",
    "throttle the link of each rank that sends KV caches, like 50MB/s (default: no limit)",
    sets="link_bytes_per_s",
    read=parse_speed,
)
OVERLAP = option(
    "cost",
    "POLICY",
    "layer-group policy: cost, fixed:N, off or adaptive; adaptive takes settings: "
    "adaptive:min_tokens=3072,max_iters=10,min_iters=4,saturation=3",
    sets="policy",
)
FIRST_TOKEN = option(
    "prefill", None, "which side streams the first token; decode does it after the hand-over", sets=None
)
DEVICE = option("auto", "DEVICE", "cpu, cuda, or auto: cuda where torch sees a GPU")
DRAFT = option(
    0,
    "[N]",
    "speculative decoding with the model's own draft (MTP) layer, N guesses a step (--draft alone: 1)",
    sets="draft_tokens",
    alone=1,
    min=0,
)
ENDPOINT_PROCESS = option(
    None,
    None,
    "run each rank's KV transfers in a separate process (default: on a GPU)",
    sets="has_endpoint_process",
)
QUEUE_TIMEOUT = option(
    None,
    "S",
    "seconds that a request may wait in a queue before it is refused with 503 (default: no limit)",
    sets="queue_s_max",
    min=0.001,
)
LOCAL_PREFILL_MAX = option(
    None,
    "N",
    "longest prompt, in tokens, that a decode instance prefills itself if that is faster; 0: always hand "
    "over (default: one chunk of decode)",
    min=0,
)
DRAIN_S = option(30.0, "S", "seconds to finish running requests after SIGTERM", min=0)
API_KEY_FILE = option(None, "FILE", "API keys of clients, one per line (default: BATON_API_KEY)")
CLIENT_KEY_FILE = option(None, "FILE", "file whose first line is the API key (default: BATON_API_KEY)")
SECRET_FILE = option(None, "FILE", "secret shared by all instances (default: BATON_SECRET)")
PREFILL_ARGS = option(None, "ARGS", "`baton serve` (or `vllm serve`) options of the prefill side only")
DECODE_ARGS = option(None, "ARGS", "`baton serve` (or `vllm serve`) options of the decode side only")
POLICY = option("least_loaded", None, "how the router picks an instance")
LOCAL = option("auto", None, "which prompts a decode instance prefills itself")
ENGINE = option("baton", None, "what the instances run: Baton's own engine, or vLLM")
LAYOUT_REMEDIES = dict.fromkeys(
    ("-tp", "-pp", "-dp", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    "give a layout for each side, like --prefill tp2 --decode tp2",
)
"""For commands that start both sides: they have no sizes of one layout."""
PORT = option(8000, "PORT", "port; 0: any free port", min=0, max=65_535)
HOST = option(settings.LOOPBACK, "ADDRESS", "address to bind")
URL_TLS_CA = option(None, "FILE", "PEM CA certificate to verify an https URL with (default: the system's)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Of an instance; the two sides of a hand-over may differ in all of them.

    Each sets a field of EngineConfig.
    """

    given: tuple[str, ...] = ()
    """The names of those that were on the command line."""
    transport: str = TRANSPORT
    link: str | None = LINK
    overlap: str = OVERLAP
    device: str = DEVICE
    base_gpu_id: int = option(0, "N", "GPU of the first rank; the others take the next ones", min=0)
    gpu_memory_utilization: float = option(
        0.9, "SHARE", "share of each GPU for weights, workspace and KV cache"
    )
    dtype: str = option(
        "auto",
        "DTYPE",
        "dtype of weights and activations: auto (the checkpoint's), bfloat16, float16 or float32",
    )
    kv_cache_dtype: str = option(
        "auto", "DTYPE", "KV cache dtype: auto (that of --dtype), bfloat16, float16, float32 or fp8"
    )
    kv_layout: str | None = option(
        None,
        "ORDER",
        "KV cache memory layout: hnd.fused (K and V in one page) or hnd.apart (default: fused if possible)",
    )
    page_tokens: int = option(16, "N", "KV cache page size in tokens", "--block-size", min=1)
    pool_tokens: int = option(
        0, "N", "KV cache size in tokens; 0: what fits on the GPU, or into 512 MiB without one", min=0
    )
    max_model_len: int = option(
        0,
        "N",
        "maximum context length in tokens, prompt and answer; 0: from the model config",
        "--context",
        sets="context_max",
        min=0,
    )
    max_num_seqs: int = option(64, "N", "maximum sequences computed in one step", sets="sequences_max", min=1)
    state_slots: int = option(
        0, "N", "sequences whose recurrent state is kept at once; 0: what fits into 512 MiB", min=0
    )
    chunk_tokens: int = option(
        512, "N", "maximum prompt tokens prefilled in one step", "--max-num-batched-tokens", min=1
    )
    no_prefix_caching: bool = flag(
        "do not reuse the KV cache of common prompt prefixes", sets="has_prefix_cache", read=not_
    )
    queue: int = option(256, "N", "maximum waiting requests", sets="queue_max", min=1)
    queue_timeout: float | None = QUEUE_TIMEOUT
    staging_mb: int = option(
        0,
        "N",
        "staging buffer of each rank for KV cache conversion, in MiB; 0: from the KV cache size",
        min=0,
    )
    packing: str = option(
        "convert",
        "WHEN",
        "when KV transfers go through the staging buffer: convert (only to another dtype) or cost (also "
        "instead of many small copies)",
    )
    verify: bool = flag("verify received KV caches with checksums", sets="is_verified")
    endpoint_process: bool | None = ENDPOINT_PROCESS
    silence_s: float = option(3.0, "S", "seconds without a heartbeat before a rank or peer counts as lost")
    progress_s: float = option(30.0, "S", "seconds without progress until a KV transfer fails")
    transfer_timeout: float = option(
        600.0, "S", "seconds until a KV transfer fails, prefill included", sets="total_s"
    )
    ungranted_share: float = option(
        0.5,
        "SHARE",
        "share of the KV cache that prompts may hold at prefill before decode has room for them",
        sets="ungranted_share_max",
    )
    num_reserved_decode_tokens: int = option(
        512,
        "N",
        "further tokens of every running answer that decode keeps room for when it takes a prompt",
        sets="growth_tokens",
        min=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions(EngineOptions):
    """Of an instance, with those that are the same for all instances of a deployment."""

    model: str = MODEL
    served_model_name: str | None = option(
        None, "NAME", "model name in the API, for requests and responses (default: --model)", sets=None
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        None,
        "sampling defaults of requests: auto (the checkpoint's generation_config.json) or none (OpenAI's)",
    )
    tool_call_parser: ToolCallParser = option(
        "auto",
        None,
        "format of the model's tool calls: auto (by its chat template), none (they stay text), or a name as "
        "in vLLM",
        sets=None,
    )
    first_token: Side = FIRST_TOKEN
    draft: int = DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Of every process that others connect to: certificates and logs."""

    tls_cert: Path | None = option(None, "FILE", "PEM certificate, to serve over TLS")
    tls_key: Path | None = option(None, "FILE", "PEM key of the certificate")
    tls_ca: Path | None = option(None, "FILE", "PEM CA certificate to verify peers with")
    log_level: Level = option("info", None, "least severe messages that are logged")
    log_format: Form = option("text", None, "log lines as text or as one JSON object each, on stderr")

    def tls(self) -> Tls | None:
        """The certificates; raises where one is missing."""
        return settings.tls_files(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """Of `baton up`; --prefill-args and --decode-args go before what is given for all instances."""

    prefill: str = option(MISSING, "LAYOUT,...", "one layout per prefill instance, like pp2 or tp2,tp2")
    decode: str | None = option(
        None,
        "LAYOUT,...",
        "one layout per decode instance (default: none; every instance prefills and decodes)",
    )
    prefill_args: str | None = PREFILL_ARGS
    decode_args: str | None = DECODE_ARGS
    port: int = like(PORT, 8000, "port of the router; 0: any free port")
    host: str = like(HOST, settings.LOOPBACK, "address the router binds")
    policy: RouterPolicy = POLICY
    local: Local = LOCAL
    local_prefill_max: int | None = LOCAL_PREFILL_MAX
    api_key_file: Path | None = API_KEY_FILE
    engine: Engine = ENGINE
    vllm: str | None = option(
        None, "PROGRAM", "the vllm program (default: BATON_VLLM, beside this Python, or on PATH)"
    )
    vllm_args: tuple[str, ...] = argument("[-- VLLM-ARGS]", ())
    instance: InstanceOptions
    server: ServerOptions

    @property
    def is_vllm(self) -> bool:
        """Whether instances run vLLM."""
        return self.engine == "vllm"

    @property
    def model_name(self) -> str:
        """As clients name it."""
        return self.instance.served_model_name or self.instance.model

    @property
    def layouts(self) -> list[tuple[str, str, str]]:
        """(role, name, layout) of every instance, prefill instances first; raises on none, or too many."""
        prefills, decodes = split_layouts("--prefill", self.prefill), split_layouts("--decode", self.decode)
        return [
            (role, f"{role}-{index}", layout)
            for role, layouts in (("prefill" if decodes else "both", prefills), ("decode", decodes))
            for index, layout in enumerate(layouts)
        ]


def split_layouts(option: str, text: str | None) -> list[str]:
    """The layouts of `pp2,tp3`, one for each instance."""
    layouts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(layouts):
        raise ConfigError(f"{option} {text!r} has an empty layout; write it like pp2 or pp2,tp2")
    if len(layouts) > NUM_INSTANCES_MAX:
        raise ConfigError(f"{option} has {len(layouts)} layouts; at most {NUM_INSTANCES_MAX} are started")
    return layouts
