"""What a rank consists of, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.attention.kernels import prefill
from baton.engine.attention.pools import DTYPES, CachePools
from baton.engine.checkpoint import open_checkpoint
from baton.engine.model.build import build, describe
from baton.engine.model.seam import Stage
from baton.engine.parallel.mesh import Mesh, connect
from baton.engine.rank.clock import Clock, clock_of
from baton.engine.rank.config import RankConfig
from baton.engine.rank.handing import Handing
from baton.engine.rank.layer_bytes import LayerBytes
from baton.engine.runner import Runner
from baton.engine.steps import Answer, Attach
from baton.plan import Spec, parse_layout
from baton.plan.models.config import read_cache
from baton.plan.ownership import buffers
from baton.session import Endpoint, EndpointConfig, SocketConfig, Timings
from baton.transport import Transport, open_transport, option_names, parse_transport
from baton.transport.wrappers import wrap


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is there before the instance knows its coordinator."""

    stage: Stage
    mesh: Mesh
    spec: Spec
    device: torch.device
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole rank."""

    runner: Runner
    mesh: Mesh
    handing: Handing
    clock: Clock
    is_sampler: bool
    vocab_size: int
    layer_bytes: LayerBytes


def load(config: RankConfig) -> Loaded:
    """Weights of this rank, and the other ranks of the instance."""
    checkpoint = open_checkpoint(config.model)
    architecture = describe(checkpoint.config, config.context_max)
    cache = read_cache(checkpoint.config, f"model {config.model}", has_draft=config.has_draft)
    layout = parse_layout(config.layout)
    device = _device(config)
    prefill.preload(device)
    mesh = connect(layout, config.rank, Path(config.rendezvous), device)
    cut = mesh.cut(cache.num_layers, DTYPES[config.dtype], device)
    stage = build(checkpoint, cut, max_context=config.context_max, has_draft=config.has_draft)
    spec = config.spec(cache)
    return Loaded(
        stage,
        mesh,
        spec,
        device,
        f"{checkpoint.fingerprint()} {config.dtype}",
        architecture.vocab_size,
    )


def attach(
    config: RankConfig, loaded: Loaded, coordinator: Attach | None, tell: Callable[[Answer], None]
) -> Parts:
    """The rank's pools, its endpoint and the runner over them."""
    spec, mesh = loaded.spec, loaded.mesh
    transport = _transport(config)
    pools = _pools(spec, config.rank, transport, loaded.device)
    endpoint = Endpoint(
        EndpointConfig(
            instance=config.instance,
            spec=spec,
            rank=config.rank,
            secret=config.secret,
            role=config.role,
            epoch=coordinator.epoch if coordinator else 0,
            coordinator=coordinator.coordinator if coordinator else None,
            registry=config.registry,
            embed_registry=config.embed_registry if coordinator is None else None,
            fingerprint=loaded.fingerprint,
            staging_bytes=config.staging_bytes,
            timings=Timings(silence_s=config.silence_s),
            url=config.url,
            sockets=SocketConfig(host=config.host, port=0 if coordinator else config.port, tls=config.tls),
        ),
        pools,
        transport,
    )
    stages = spec.layout.stages(spec.cache.num_layers, "this")
    layers = stages[mesh.at["pp"]]
    clock = clock_of(loaded.device)
    handing = Handing(
        endpoint,
        layers,
        tell,
        num_drafts=int(loaded.stage.draft is not None),
        # A later stage has nothing to launch before the first one is through its layers.
        is_begun_later=clock.is_late and mesh.is_first,
    )
    caches = CachePools(spec, config.rank, pools, loaded.device)
    is_sampler = mesh.at["pp"] == len(stages) - 1 and mesh.at["cp"] == 0 and mesh.at["tp"] == 0
    return Parts(
        Runner(loaded.stage, mesh, caches),
        mesh,
        handing,
        clock,
        is_sampler,
        loaded.vocab_size,
        LayerBytes.of_rank(spec, config.rank, layers),
    )


def _device(config: RankConfig) -> torch.device:
    if config.device != "cuda":
        return torch.device(config.device)
    device = torch.device("cuda", config.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _transport(config: RankConfig) -> Transport:
    name, options = parse_transport(config.transport)
    if "host" in option_names(name):
        # Peers reach its memory by the address that they reach its coordinator by, unless told otherwise.
        options.setdefault("host", config.host)
    plain = open_transport(name, **options)
    if not config.link_bytes_per_s:
        return plain
    return wrap("throttled", plain, bytes_per_s=config.link_bytes_per_s, is_shared=True)


def _pools(spec: Spec, rank: int, transport: Transport, device: torch.device) -> dict[str, Any]:
    sizes = buffers(spec, rank, "pool")
    if device.type == "cuda":
        return {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    return {name: transport.allocate(size) for name, size in sizes.items()}
