"""Options of the connector, and the vLLM versions that it knows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.plan import overlap
from baton.session import SocketConfig, Timings
from baton.settings import secret, tls_files
from baton.transport import Transport, open_transport, option_names, parse_transport

VERSIONS = ("0.31", "0.32")
"""Releases of vLLM that the tests run."""
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def check_version() -> None:
    """Raises ConfigError unless vLLM is there in a version that the connector knows."""
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ImportError as cause:
        raise ConfigError(
            f"vLLM cannot be imported: {cause}; install vLLM {VERSIONS[-1]} beside Baton"
        ) from None
    if not any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        raise ConfigError(
            f"vLLM {version}: this Baton knows the connector API of vLLM {', '.join(VERSIONS)}; "
            f"install one of these"
        )


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The keys of `kv_connector_extra_config`."""

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
    """The name in the registry; by default vLLM's engine id."""
    url: str = ""
    """Where this server answers HTTP, for routers that find it in the registry."""
    fingerprint: str = ""
    """Of the weights, if the model's configuration says too little about them."""
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
        for field in fields(ConnectorConfig):
            name = str(field.type).removesuffix(" | None")
            types[field.name] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}[name]
        for key, value in options.items():
            if key not in types:
                known = ", ".join(types)
                raise ConfigError(f"{where} has no {key!r}; Baton's connector knows {known}")
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
