"""`baton up`: a whole deployment on this machine, until it is interrupted."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from baton.cli.options import (
    ApiKeyFile,
    DecodeArgs,
    Draft,
    Link,
    LocalPrefillMax,
    LogFormat,
    LogLevel,
    Model,
    NoPrefixCaching,
    PrefillArgs,
    RouterPolicy,
    ServedModelName,
    TlsCa,
    TlsCert,
    TlsKey,
    Verify,
)
from baton.errors import ConfigError


def up(
    *,
    model: Model,
    served_model_name: ServedModelName = None,
    prefill: Annotated[
        str, typer.Option(metavar="LAYOUT,...", help="one layout per prefill instance, like pp2 or tp2,tp2")
    ],
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT,...",
            help="one layout per decode instance (default: none; every instance prefills and decodes)",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="port of the router; 0: any free port")
    ] = 8000,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address the router binds")] = "127.0.0.1",
    api_key_file: ApiKeyFile = None,
    policy: Annotated[
        RouterPolicy | None,
        typer.Option(help="how the router picks an instance (default: least_loaded)"),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="KV transfer transport: NAME or NAME:OPTION=VALUE (default: shm; cuda_ipc between GPUs)",
        ),
    ] = None,
    local_prefill_max: LocalPrefillMax = None,
    link: Link = None,
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="layer-group policy: cost (default), fixed:N, off or adaptive; adaptive takes settings, as "
            "adaptive:min_tokens=3072 and, after commas, max_iters=10, min_iters=4, saturation=3",
        ),
    ] = None,
    first_token: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(
            help="which side streams the first token: prefill (default) or decode, after the hand-over",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="weights and KV cache dtype: auto (the checkpoint's, default), bfloat16, float16 or float32",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="cpu, cuda, or auto (default): cuda where torch sees a GPU"),
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"] | None,
        typer.Option(
            help="sampling defaults of requests: auto (default, the checkpoint's generation_config.json) or "
            "none (OpenAI's)"
        ),
    ] = None,
    page_tokens: Annotated[
        int | None,
        typer.Option(
            "--page-tokens",
            "--block-size",
            min=1,
            metavar="N",
            help="KV cache page size in tokens (default: 16)",
        ),
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="KV cache size in tokens (default: what fits on the GPU, or into 512 MiB without one)",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="share of each GPU that its instances take (default: 0.9)"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            "--context",
            min=1,
            metavar="N",
            help="maximum context length in tokens, prompt and answer (default: from the model config)",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="maximum sequences computed in one step (default: 64)"),
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens",
            "--max-num-batched-tokens",
            min=1,
            metavar="N",
            help="maximum prompt tokens prefilled in one step (default: 512)",
        ),
    ] = None,
    prefill_args: PrefillArgs = None,
    decode_args: DecodeArgs = None,
    verify: Verify = False,
    queue: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="maximum waiting requests per instance (default: 256)"),
    ] = None,
    transfer_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="seconds until a KV transfer fails, with the prefill that it follows (default: 600)",
        ),
    ] = None,
    no_prefix_caching: NoPrefixCaching = False,
    draft: Draft = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    engine: Annotated[
        Literal["baton", "vllm"], typer.Option(help="what the instances run: Baton's own engine, or vLLM")
    ] = "baton",
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM",
            help="the vllm program (default: BATON_VLLM, beside this Python, or on the path)",
        ),
    ] = None,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM-ARGS", hidden=True),
    ] = None,
) -> None:
    """Start a registry, prefill and decode instances and a router, and serve until interrupted.

    VLLM-ARGS, with --engine vllm, are options of `vllm serve`.
    """
    # What follows takes longer to import than --help may take.
    from baton import settings
    from baton.cli.checks import check_first, parse_layouts

    is_vllm = engine == "vllm"
    prefills, decodes = parse_layouts("--prefill", prefill), parse_layouts("--decode", decode)
    if not is_vllm:
        if vllm or vllm_args:
            given = " ".join(vllm_args or ["--vllm"])
            raise ConfigError(f"{given!r} is for vLLM; give --engine vllm too, or leave it out")
        check_first(model, (*prefills, *decodes), dtype)
    settings.check_port(host, port)
    from baton.cli.deployment import DeploymentOptions
    from baton.cli.side_args import parse_side_args
    from baton.cli.start import start, start_vllm
    from baton.cli.vllm_servers import parse_vllm_args

    parse_args = parse_vllm_args if is_vllm else parse_side_args
    options = DeploymentOptions(
        model=model,
        prefills=prefills,
        decodes=decodes,
        link=link,
        transport=transport,
        overlap=overlap,
        first_token=first_token,
        dtype=dtype,
        device=device,
        generation_config=generation_config,
        page_tokens=page_tokens,
        pool_tokens=pool_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        queue=queue,
        transfer_timeout=transfer_timeout,
        served_model_name=served_model_name,
        no_prefix_caching=no_prefix_caching,
        draft=draft,
        verify=verify,
        prefill_args=parse_args("--prefill-args", prefill_args),
        decode_args=parse_args("--decode-args", decode_args),
        host=host,
        port=port,
        policy=policy,
        local_prefill_max=local_prefill_max,
        api_key_file=api_key_file,
        tls=settings.tls_files(tls_cert, tls_key, tls_ca),
        log_level=log_level,
        log_format=log_format,
        vllm=settings.vllm_command(vllm) if is_vllm else "",
        vllm_args=tuple(vllm_args or ()),
    )
    (start_vllm if is_vllm else start)(options)
