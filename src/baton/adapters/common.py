"""What the connectors of several engines share: options, endpoints, the layers of a step and its trace."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint.names import find_model
from baton.checkpoint.opening import open_checkpoint
from baton.errors import ConfigError
from baton.plan import Spec, overlap
from baton.plan.cache import Units
from baton.session import Endpoint, EndpointConfig, Failed, Handle, Sending, SocketConfig, Timings
from baton.settings import check_registry, secret, tls_files
from baton.transport import (
    NOW,
    CudaFence,
    Fence,
    Transport,
    open_transport,
    option_names,
    parse_transport,
)

DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "fp8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

ATTACH_S_MAX = 120.0
"""How long the other ranks may take to attach once the first one waits for them."""

PORT_MAX = 65535

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerMesh:
    """Where a worker is among those of its engine, and how many KV heads the model has."""

    pp: int
    tp: int
    pp_size: int
    tp_size: int
    num_kv_heads: int
    cp: int = 0
    cp_size: int = 1
    """Ranks with the same tokens and heads, each of a TP group of its own."""

    @staticmethod
    def of(pp: Any, tp: Any, num_kv_heads: int, cp: Any = None) -> WorkerMesh:
        """From the engine's process groups: vLLM and SGLang have the same class for them."""
        mesh = WorkerMesh(pp.rank_in_group, tp.rank_in_group, pp.world_size, tp.world_size, num_kv_heads)
        return replace(mesh, cp=cp.rank_in_group, cp_size=cp.world_size) if cp is not None else mesh

    @property
    def rank(self) -> int:
        return (self.pp * self.cp_size + self.cp) * self.tp_size + self.tp

    def units(self, num_heads: int) -> Units | None:
        """The heads of a cache of which a rank has so many; none: every rank has all of it."""
        is_mirrored = self.num_kv_heads < self.tp_size
        return Units(self.num_kv_heads if is_mirrored else num_heads * self.tp_size) if num_heads else None


class StepLayers:
    """The layers of one forward, in the groups that leave together."""

    def __init__(self, policy: str, layers: Mapping[Any, int], num_tokens: Sequence[int]) -> None:
        """`layers`: their numbers by what the engine calls them; `num_tokens`: of whole prompts, of which
        the forward may compute a chunk."""
        numbers = sorted(set(layers.values()))
        times = overlap.LayerTimes((0.0,) * len(numbers), (0.0,) * len(numbers), 0.0)
        chosen = overlap.choose(policy, times, sum(num_tokens) // len(num_tokens))
        self._group_of = {
            number: (numbers[start], numbers[stop - 1] + 1)
            for start, stop in chosen
            for number in numbers[start:stop]
        }
        self._layers = layers
        self.left: dict[tuple[int, int], set[Hashable]] = {}
        """Per group not yet offered: the layers not computed yet."""
        self.repeated: list[Hashable] = []
        """Layers that were reported again. Where an engine computes a batch in parts, the first report of a
        layer comes before all its tokens are stored, so nothing of this step may be used."""
        for name, number in layers.items():
            self.left.setdefault(self._group_of[number], set()).add(name)

    def done(self, name: Hashable) -> tuple[int, int] | None:
        """A layer is computed; its group if that was the last one of it."""
        number = self._layers.get(name)
        if number is None:
            return None
        group = self._group_of[number]
        names = self.left.get(group, set())
        if name not in names:
            self.repeated.append(name)
            return None
        names.remove(name)
        if names:
            return None
        del self.left[group]
        return group


@dataclass(slots=True)
class StepTrace:
    """One step of a prompt: from its begin to its end, and when each group of layers was offered."""

    begun_s: float
    ended_s: float = 0.0
    offered: list[tuple[tuple[int, int], tuple[int, int], float]] = field(default_factory=list)
    """Layers, tokens and the time."""


def write_trace(file: Path, sending: Sending, rank: int, **more: Any) -> None:
    """A line of JSON for a prompt that was sent."""
    line = {
        "transfer": sending.transfer,
        "outcome": outcome_text(sending),
        "rank": rank,
        "copies": [asdict(copy) for copy in sending.copies],
    }
    with file.open("a") as opened:
        opened.write(json.dumps(line | more) + "\n")


def outcome_text(handle: Handle) -> str:
    """Ready, or why not."""
    state = handle.state
    return str(state.cause) if isinstance(state, Failed) else type(state).__name__.lower()


def fences(is_on_gpu: bool, stream: Callable[[], Any] = lambda: None) -> Callable[[], Fence]:
    """Returns a function that makes a fence for all work launched so far on a stream (default: current)."""

    def event_fence() -> Fence:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream())
        return CudaFence(event)

    return event_fence if is_on_gpu else lambda: NOW


def memory_of(tensor: torch.Tensor) -> Any:
    """The whole allocation that a tensor lies in, as bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole if whole.is_cuda else whole.numpy()


def gather_stages(layers: Any, pp: Any) -> list[Any]:
    """The layers of every pipeline stage."""
    stages = [layers] * pp.world_size
    if pp.world_size > 1:
        torch.distributed.all_gather_object(stages, layers, group=pp.cpu_group)
    return stages


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Options: the keys of vLLM's `kv_connector_extra_config`, or of BATON_SGLANG."""

    host: str = "127.0.0.1"
    """The address of this machine that peers use."""
    port: int | None = None
    """Where an engine listens for decode instances, plus its data-parallel rank. 0 takes any free one; None
    is `kv_port` of the transfer config, or any free one on a consumer."""
    transport: str = "tcp"
    secret_file: str | None = None
    """Without it the variable BATON_SECRET has the secret."""
    registry: str | None = None
    instance: str = ""
    """The name in the registry; by default made of what the engine calls itself."""
    url: str = ""
    """Where this server answers HTTP, for routers that find it in the registry."""
    fingerprint: str = ""
    """Of the weights, where they are not those of the checkpoint, or Baton cannot read it."""
    ungranted_share_max: float = 0.5
    """The share of the blocks that prompts may hold which decode has not asked for; a pure producer may take
    1.0."""
    split_kv: bool = False
    """vLLM only: whether K and V move token by token, so that engines of other kinds have the same; all of a
    prompt is then handed over."""
    overlap: str = "fixed:1"
    """Which layers leave together: fixed:N, adaptive or off."""
    verify: bool = False
    """Whether decode compares a checksum of every chunk."""
    offer_s: float = 120.0
    progress_s: float = 120.0
    """The first step of a server may take a minute."""
    total_s: float = 600.0
    silence_s: float = 10.0
    """A worker that computes with all cores may answer late."""
    trace: str | None = None
    """A folder: every worker writes there when the layers of each prompt were computed and copied."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @staticmethod
    def parse(options: Mapping[str, Any], where: str = "kv_connector_extra_config") -> ConnectorConfig:
        """Reads the options; raises ConfigError with the key and the remedy."""
        types: dict[str, tuple[type, ...]] = {}
        for known in fields(ConnectorConfig):
            name = str(known.type).removesuffix(" | None")
            types[known.name] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}[name]
        for key, value in options.items():
            if key not in types:
                raise ConfigError(f"{where} has no {key!r}; Baton's connector knows {', '.join(types)}")
            if not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
                wanted = {str: "text", int: "a whole number", bool: "true or false", float: "a number"}
                remedy = wanted[types[key][-1]]
                raise ConfigError(f"{where}: {key} is {value!r}; give {remedy}")
        config = ConnectorConfig(**options)
        for key, is_usable, remedy in (
            (
                "host",
                config.host not in ("", "0.0.0.0", "::"),
                "the address that peers reach this machine by",
            ),
            ("port", config.port is None or 0 <= config.port <= PORT_MAX, f"0 to {PORT_MAX}"),
            ("ungranted_share_max", 0 < config.ungranted_share_max <= 1, "a share above 0, up to 1"),
            *(
                (key, 0 < getattr(config, key) < math.inf, "a finite number of seconds above 0")
                for key in ("offer_s", "progress_s", "total_s", "silence_s")
            ),
        ):
            if not is_usable:
                raise ConfigError(f"{where}: {key} is {getattr(config, key)!r}; give {remedy}")
        if config.overlap.partition(":")[0] == "cost":
            raise ConfigError(
                "overlap 'cost' needs timings that the engine does not give; use fixed:N or adaptive"
            )
        overlap.choose(config.overlap, overlap.LayerTimes((0.0,), (0.0,), 0.0), 0)
        parse_transport(config.transport)
        if config.registry is not None:
            check_registry(config.registry)
        return config

    def sockets(self, kv_role: str, kv_port: int, dp: int) -> SocketConfig:
        """Where the coordinator of one engine listens; ports follow the data-parallel rank."""
        port = self.port
        if port is None:
            port = 0 if kv_role == "kv_consumer" else kv_port
        if port and port + dp > PORT_MAX:
            raise ConfigError(
                f"port {port + dp} of data-parallel rank {dp}: the first rank's is {port}; give it at most "
                f"{PORT_MAX - dp}"
            )
        paths = (Path(path) if path else None for path in (self.tls_cert, self.tls_key, self.tls_ca))
        return SocketConfig(host=self.host, port=port + dp if port else 0, tls=tls_files(*paths))

    def trace_file(self, instance: str, rank: int) -> Path | None:
        """Where a worker writes its trace."""
        if self.trace is None:
            return None
        if not Path(self.trace).is_dir():
            raise ConfigError(f"trace {self.trace!r} is not a folder; make it first")
        return Path(self.trace) / f"{instance}.rank{rank}.jsonl"

    def secret(self) -> bytes:
        """The secret that all instances share."""
        return secret(self.secret_file)

    def timings(self) -> Timings:
        """The deadlines of transfers and links."""
        return Timings(
            offer_s=self.offer_s,
            progress_s=self.progress_s,
            total_s=self.total_s,
            silence_s=self.silence_s,
        )

    def open_transport(self) -> Transport:
        """The transport; its peers reach this memory by the same address, unless its options name another."""
        name, options = parse_transport(self.transport)
        if "host" in option_names(name):
            options.setdefault("host", self.host)
        return open_transport(name, **options)


def open_endpoint(
    options: ConnectorConfig,
    spec: Spec,
    pools: Mapping[str, Any],
    transport: Transport,
    groups: Sequence[Any],
    **identity: Any,
) -> Endpoint:
    """This rank's endpoint. The first rank hosts the coordinator; the others learn of it over the engine's
    process groups, the outermost axis first. `identity`: what else an EndpointConfig has."""
    rank = 0
    for group in groups:
        rank = rank * group.world_size + group.rank_in_group
    hosting = EndpointConfig(
        spec=spec,
        rank=rank,
        secret=options.secret(),
        registry=options.registry,
        ungranted_share_max=options.ungranted_share_max,
        timings=options.timings(),
        **identity,
    )
    endpoint = Endpoint(hosting, pools, transport) if rank == 0 else None
    known: Any = (endpoint.address, endpoint.config.epoch) if endpoint else None
    for group in reversed(groups):
        known = group.broadcast_object(known, src=0)
    coordinator, epoch = known
    if endpoint is None:
        endpoint = Endpoint(replace(hosting, coordinator=coordinator, epoch=epoch), pools, transport)
    elif not endpoint.wait_ready(ATTACH_S_MAX):
        raise ConfigError(
            f"not every one of the {spec.layout.num_ranks} ranks of {spec.layout} has attached to "
            f"{endpoint.address} within {ATTACH_S_MAX:g} s; look for errors in the logs of the other "
            f"workers, and give as host an address that they reach (it is {options.host!r})"
        )
    return endpoint


def model_fingerprint(model: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Identifies a model, which two instances must agree on besides their cache layouts.

    It is the fingerprint of the checkpoint, as Baton's own engine has it, so that unlike engines can hand
    over. Options that change the model in the files (`changes`) make it another model. A checkpoint that
    Baton cannot read, such as a quantised one, is known by its `config` alone; only engines of one kind agree
    on that.
    """
    path = find_model(model)
    try:
        if path is None:
            raise ConfigError(f"{model} is neither a folder nor a file here")
        described: list[Any] = [open_checkpoint(str(path.resolve())).fingerprint()]
    except ConfigError as error:
        logger.warning("baton: weights are not compared (set fingerprint to compare them): %s", error)
        described = [{key: value for key, value in config.items() if not key.startswith("_name")}]
    described += sorted((key, value) for key, value in changes.items() if value)
    if len(described) == 1 and isinstance(described[0], str):
        return described[0]
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
