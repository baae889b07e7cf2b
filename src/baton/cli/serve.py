"""`baton serve`: one instance behind HTTP. Its URL goes to stdout, everything else to stderr."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import re
import sys
from typing import Annotated

import typer

from baton import settings
from baton.cli.options import (
    ApiKeyFile,
    Device,
    Draft,
    DrainS,
    FirstToken,
    Model,
    Overlap,
    SecretFile,
    TlsCa,
    TlsCert,
    TlsKey,
    Transport,
)
from baton.errors import ConfigError
from baton.plan import parse_layout
from baton.protocol.timings import Timings
from baton.units import parse_speed


def serve(
    *,
    model: Model,
    role: Annotated[str, typer.Option(metavar="ROLE", help="prefill, decode or both")] = "both",
    layout: Annotated[str, typer.Option(metavar="LAYOUT", help="parallel layout, like pp2.tp2")] = "tp1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="HTTP port; 0: any free port")
    ] = 8000,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="address to bind, for HTTP and the control plane")
    ] = "127.0.0.1",
    registry: Annotated[
        str | None,
        typer.Option(metavar="URL", help="registry to join, so that routers and peers find the instance"),
    ] = None,
    bootstrap_port: Annotated[
        int,
        typer.Option(min=0, max=65_535, metavar="PORT", help="port of the coordinator; 0: any free port"),
    ] = 0,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="instance name (default: made of role, host and port)"),
    ] = None,
    transport: Transport = "shm",
    link: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="throttle each rank's link, like 50MB/s (default: no limit)"),
    ] = None,
    overlap: Overlap = "cost",
    first_token: FirstToken = "prefill",
    pool_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="KV cache size in tokens; 0: what fits into 512 MiB")
    ] = 0,
    page_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="KV cache page size in tokens")] = 16,
    context: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="maximum context length in tokens; 0: from the model config"),
    ] = 0,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="maximum prompt tokens prefilled in one step")
    ] = 512,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="maximum waiting requests")] = 256,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="dtype of weights and activations: fp32, bf16 or fp16")
    ] = "fp32",
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="KV cache dtype: fp32, bf16 or fp16 (default: same as --dtype)"),
    ] = None,
    kv_layout: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help="KV cache memory layout: hnd.fused (K and V in one page) or hnd.apart "
            "(default: fused where the model allows it)",
        ),
    ] = None,
    staging_mb: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="staging buffer of each rank in MiB, to convert the KV cache to another dtype in; 0: from "
            "the KV cache size",
        ),
    ] = 0,
    packing: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="when KV transfers go through the staging buffer: convert (only to another dtype) or cost "
            "(also instead of many small copies)",
        ),
    ] = "convert",
    verify: Annotated[
        bool, typer.Option("--verify", help="verify the received KV cache with checksums")
    ] = False,
    device: Device = "cpu",
    draft: Draft = False,
    drain_s: DrainS = 30.0,
    silence_s: Annotated[
        float, typer.Option(metavar="S", help="seconds without a heartbeat until a rank or peer is lost")
    ] = Timings().silence_s,
    progress_s: Annotated[
        float, typer.Option(metavar="S", help="seconds without progress until a KV transfer fails")
    ] = Timings().progress_s,
    ungranted_share: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="share of the KV cache that prompts may hold at prefill before decode has room for them",
        ),
    ] = 0.5,
    endpoint_process: Annotated[
        bool | None,
        typer.Option(
            "--endpoint-process/--no-endpoint-process",
            help="run KV transfers of each rank in a process of their own (default: on a GPU)",
        ),
    ] = None,
    api_key_file: ApiKeyFile = None,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Serve a model over HTTP; as a prefill or decode instance it hands KV caches over to its peers."""
    # Importing torch takes seconds, which --help does without. Server and workers share one import.
    from baton.engine.fork_server import FORK_SERVERS

    num_ranks = parse_layout(layout).num_ranks
    FORK_SERVERS.fork_early(settings.rank_environment(settings.default_threads(num_ranks)))
    from baton.engine.config import EngineConfig, check_config
    from baton.serving.server import ServerConfig
    from baton.serving.server import serve as run_server

    tls = settings.tls_files(tls_cert, tls_key, tls_ca)
    is_reached_by_peers = role != "both" or registry is not None
    _check_host(host, is_reached_by_peers)
    secret = b""
    if is_reached_by_peers or secret_file is not None or settings.has_secret():
        secret = settings.secret(None if secret_file is None else str(secret_file))
    instance = EngineConfig(
        model=model,
        layout=layout,
        name=name or re.sub(r"[^\w.-]", "-", f"{role}-{host}-{port}"),
        role=role,
        secret=secret,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or "",
        kv_layout=kv_layout or "",
        device=device,
        page_tokens=page_tokens,
        pool_tokens=pool_tokens,
        context_max=context,
        chunk_tokens=chunk_tokens,
        transport=transport,
        link_bytes_per_s=parse_speed(link) if link else 0.0,
        policy=overlap,
        staging_mb=staging_mb,
        packing=packing,
        is_verified=verify,
        host=host,
        port=bootstrap_port,
        tls=tls,
        registry=registry,
        queue_max=queue,
        silence_s=silence_s,
        progress_s=progress_s,
        ungranted_share_max=ungranted_share,
        has_endpoint_process=endpoint_process,
        has_draft=draft,
    )
    check_config(instance)  # before the server listens and prints its URL
    keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
    config = ServerConfig(instance, host, port, keys, first_token, drain_s, tls=tls)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("baton.serving.server").setLevel(logging.INFO)
    try:
        asyncio.run(run_server(config, lambda line: print(line, flush=True)))
    finally:
        gc.freeze()  # a last collection over all of torch would take seconds


def _check_host(host: str, is_reached_by_peers: bool) -> None:
    """Peers are sent the address that is bound, so it must be a real one."""
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    if is_any and is_reached_by_peers:
        raise ConfigError(
            f"host {host!r} is not an address that peers can connect to; name this machine's own address"
        )
