"""`baton serve`: one instance behind HTTP. Its URL goes to stdout, everything else to stderr."""

from __future__ import annotations

import gc
import ipaddress
import re
from typing import Annotated, Literal

import typer

from baton.cli.options import (
    ApiKeyFile,
    Device,
    Draft,
    DrainS,
    EndpointProcess,
    FirstToken,
    LogFormat,
    LogLevel,
    Model,
    NoPrefixCaching,
    Overlap,
    SecretFile,
    ServedModelName,
    TlsCa,
    TlsCert,
    TlsKey,
    Transport,
)
from baton.errors import ConfigError


def serve(
    *,
    model: Model,
    served_model_name: ServedModelName = None,
    role: Annotated[
        Literal["prefill", "decode", "both"], typer.Option(help="what the instance does")
    ] = "both",
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="parallel layout, like pp2.tp2 (default: made of -tp, -pp and -dp)",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("-tp", "--tensor-parallel-size", min=1, metavar="N", help="tensor parallel size")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option("-pp", "--pipeline-parallel-size", min=1, metavar="N", help="pipeline parallel size"),
    ] = 1,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "-dp",
            "--data-parallel-size",
            min=1,
            metavar="N",
            help="data parallel size; as in vLLM, -dp 2 -tp 4 are 8 ranks",
        ),
    ] = 1,
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
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="KV cache size in tokens; 0: what fits on the GPU, or into 512 MiB without one",
        ),
    ] = 0,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(metavar="SHARE", help="share of each GPU for weights, workspace and KV cache"),
    ] = 0.9,
    base_gpu_id: Annotated[
        int, typer.Option(min=0, metavar="N", help="GPU of the first rank; the others take the next ones")
    ] = 0,
    page_tokens: Annotated[
        int,
        typer.Option(
            "--page-tokens", "--block-size", min=1, metavar="N", help="KV cache page size in tokens"
        ),
    ] = 16,
    max_model_len: Annotated[
        int,
        typer.Option(
            "--max-model-len",
            "--context",
            min=0,
            metavar="N",
            help="maximum context length in tokens, prompt and answer; 0: from the model config",
        ),
    ] = 0,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="N", help="maximum sequences computed in one step")
    ] = 64,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens",
            "--max-num-batched-tokens",
            min=1,
            metavar="N",
            help="maximum prompt tokens prefilled in one step",
        ),
    ] = 512,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="maximum waiting requests")] = 256,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="dtype of weights and activations: auto (the checkpoint's), bfloat16, float16 or float32",
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="KV cache dtype: auto (default: that of --dtype), bfloat16, float16, float32 or fp8",
        ),
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
    no_prefix_caching: NoPrefixCaching = False,
    device: Device = "auto",
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="sampling defaults of requests: auto (the checkpoint's generation_config.json) or none "
            "(OpenAI's)"
        ),
    ] = "auto",
    draft: Draft = False,
    drain_s: DrainS = 30.0,
    silence_s: Annotated[
        float, typer.Option(metavar="S", help="seconds without a heartbeat until a rank or peer is lost")
    ] = 3.0,
    progress_s: Annotated[
        float, typer.Option(metavar="S", help="seconds without progress until a KV transfer fails")
    ] = 30.0,
    transfer_timeout: Annotated[
        float,
        typer.Option(metavar="S", help="seconds until a KV transfer fails, with the prefill that it follows"),
    ] = 600.0,
    ungranted_share: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="share of the KV cache that prompts may hold at prefill before decode has room for them",
        ),
    ] = 0.5,
    endpoint_process: EndpointProcess = None,
    api_key_file: ApiKeyFile = None,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Serve a model over HTTP; as a prefill or decode instance it hands KV caches over to its peers."""
    # What follows takes longer to import than --help may take; torch waits until all is checked.
    from baton import settings
    from baton.cli.checks import check_first

    layout = _layout(layout, tensor_parallel_size, pipeline_parallel_size, data_parallel_size)
    check_first(model, [layout], dtype)
    settings.check_port(host, port)
    import asyncio

    from baton.cli.logs import set_up_logs
    from baton.engine.config import EngineConfig, check_config
    from baton.plan.layout import parse_layout
    from baton.units import parse_speed

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
        generation_config=generation_config,
        page_tokens=page_tokens,
        pool_tokens=pool_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        base_gpu_id=base_gpu_id,
        context_max=max_model_len,
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
        sequences_max=max_num_seqs,
        queue_max=queue,
        silence_s=silence_s,
        progress_s=progress_s,
        total_s=transfer_timeout,
        ungranted_share_max=ungranted_share,
        has_prefix_cache=not no_prefix_caching,
        has_endpoint_process=endpoint_process,
        has_draft=draft,
    )
    check_config(instance)
    keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
    settings.check_binding(host, has_api_key=bool(keys), has_secret=bool(secret))
    from baton.engine.fork_server import FORK_SERVERS

    # Server and workers share one import of torch.
    FORK_SERVERS.fork_early(
        settings.rank_environment(settings.default_threads(parse_layout(layout).num_ranks))
    )
    from baton.engine.sizes import check_machine
    from baton.serving.server import ServerConfig
    from baton.serving.server import serve as run_server

    check_machine(instance)  # before the server listens and prints its URL
    config = ServerConfig(
        instance, host, port, keys, first_token, drain_s, served_model_name=served_model_name or "", tls=tls
    )
    set_up_logs(log_level, log_format)
    try:
        asyncio.run(run_server(config, lambda line: print(line, flush=True)))
    finally:
        gc.freeze()  # a last collection over all of torch would take seconds


def _layout(layout: str | None, tp: int, pp: int, dp: int) -> str:
    """As it was given, or of the sizes; ranks are numbered as vLLM does."""
    sizes = [f"{axis}{size}" for axis, size in (("dp", dp), ("pp", pp), ("tp", tp)) if size > 1]
    if layout is not None and sizes:
        raise ConfigError(f"--layout {layout} and sizes that make {'.'.join(sizes)}; give one of them")
    return layout or ".".join(sizes) or "tp1"


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
