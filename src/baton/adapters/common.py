"""What the connectors of several engines share: their options, a worker's place, and the trace of a step."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from baton.engine.checkpoint import open_checkpoint
from baton.engine.model_names import find_model
from baton.errors import ConfigError
from baton.plan import overlap
from baton.session import SocketConfig, Timings
from baton.settings import secret, tls_files
from baton.transport import Transport, open_transport, option_names, parse_transport

DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "fp8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where a worker is among those of its engine, and how many KV heads the model has."""

    pp: int
    tp: int
    pp_size: int
    tp_size: int
    num_kv_heads: int

    @property
    def rank(self) -> int:
        return self.pp * self.tp_size + self.tp


@dataclass(slots=True)
class StepTrace:
    """One step of a prompt: from its begin to its end, and when each group of layers was offered."""

    begun_s: float
    ended_s: float = 0.0
    offered: list[tuple[tuple[int, int], tuple[int, int], float]] = field(default_factory=list)
    """Layers, tokens and the time."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Options: the keys of vLLM's `kv_connector_extra_config`, or of BATON_SGLANG."""

    host: str = "127.0.0.1"
    """The address of this machine that peers use."""
    port: int = -1
    """Where an engine listens for decode instances, plus its data-parallel rank; 0 takes any free one, and -1
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
        if config.overlap.partition(":")[0] == "cost":
            raise ConfigError(
                "overlap 'cost' needs timings that the engine does not give; use fixed:N or adaptive"
            )
        overlap.choose(config.overlap, overlap.LayerTimes((0.0,), (0.0,), 0.0), 0)
        return config

    def sockets(self, kv_role: str, kv_port: int, dp: int) -> SocketConfig:
        """Where the coordinator of one engine listens; ports follow the data-parallel rank."""
        port = self.port
        if port < 0:
            port = 0 if kv_role == "kv_consumer" else kv_port
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


def model_fingerprint(model: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """What two instances have to agree on beside the layout of their caches.

    It is the fingerprint of the checkpoint, as Baton's own engine has it, so that unlike engines can hand
    over. What `changes` the model that is in the files makes it another one. A checkpoint that Baton cannot
    read, such as a quantised one, is known by its `config` alone; only engines of one kind agree on that.
    """
    path = find_model(model)
    try:
        if path is None:
            raise ConfigError(f"{model} is neither a folder nor a file here")
        described: list[Any] = [open_checkpoint(str(path.resolve())).fingerprint()]
    except ConfigError as error:
        logger.warning("baton: the weights are not compared, give their fingerprint: %s", error)
        described = [{key: value for key, value in config.items() if not key.startswith("_name")}]
    described += sorted((key, value) for key, value in changes.items() if value)
    if len(described) == 1 and isinstance(described[0], str):
        return described[0]
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
