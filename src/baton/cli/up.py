"""`baton up`: a whole deployment on this machine, until it is interrupted."""

from __future__ import annotations

import json
import shlex
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from baton import settings
from baton.cli.deployment import (
    Deployment,
    DeploymentOptions,
    pair_line,
    parse_layouts,
    plan_instances,
    plan_pairs,
)
from baton.cli.options import (
    ApiKeyFile,
    DecodeArgs,
    Draft,
    Link,
    LocalPrefillMax,
    Model,
    NoPrefixCaching,
    PrefillArgs,
    ServedModelName,
    TlsCa,
    TlsCert,
    TlsKey,
    Verify,
)
from baton.cli.side_args import parse_side_args
from baton.cli.vllm_servers import VllmServer, parse_vllm_args, plan_servers
from baton.errors import ConfigError, EngineError
from baton.serving.http import check_binding
from baton.serving.policies import policy_names

BATON_ONLY = (
    *("link", "first_token", "dtype", "device", "page_tokens", "pool_tokens", "chunk_tokens"),
    *("max_model_len", "max_num_seqs", "queue", "transfer_timeout", "served_model_name", "local_prefill_max"),
    *("no_prefix_caching", "draft"),
)
"""Options that vLLM has by other names, or not at all."""
EXAMPLE = "Explain in one sentence what a relay race is."


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
        str | None,
        typer.Option(
            metavar="POLICY",
            help="how the router picks an instance: round_robin, least_loaded (default) or prefix_aware",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="KV transfer transport: NAME or NAME:OPTION=VALUE (default: shm)"),
    ] = None,
    local_prefill_max: LocalPrefillMax = None,
    link: Link = None,
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="layer-group policy: cost (default), fixed:N, off, or adaptive with any of its settings "
            "(adaptive:min_tokens=3072,max_iters=10,min_iters=4,saturation=3)",
        ),
    ] = None,
    first_token: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE",
            help="which side streams the first token: prefill (default) or decode, after the hand-over",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="dtype of weights and KV cache: fp32 (default), bf16 or fp16"),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu (default) or cuda")] = None,
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
        typer.Option(min=1, metavar="N", help="KV cache size in tokens (default: what fits into 512 MiB)"),
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
    queue_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="seconds that a request may wait in the router for an instance with room, then 429 "
            "(default: as `baton route`)",
        ),
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
        typer.Argument(metavar="[-- VLLM-ARGS]", help="with --engine vllm: options of `vllm serve`"),
    ] = None,
) -> None:
    """Start a registry, prefill and decode instances and a router, and serve until interrupted."""
    is_vllm = engine == "vllm"
    parse_args = parse_vllm_args if is_vllm else parse_side_args
    options = DeploymentOptions(
        model=model,
        prefills=parse_layouts("--prefill", prefill),
        decodes=parse_layouts("--decode", decode),
        link=link,
        transport=transport,
        overlap=overlap,
        first_token=first_token,
        dtype=dtype,
        device=device,
        page_tokens=page_tokens,
        pool_tokens=pool_tokens,
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
        queue_timeout=queue_timeout,
        api_key_file=api_key_file,
        tls=settings.tls_files(tls_cert, tls_key, tls_ca),
        vllm=settings.vllm_command(vllm) if is_vllm else "",
        vllm_args=tuple(vllm_args or ()),
    )
    if not is_vllm and (vllm or vllm_args):
        given = " ".join(vllm_args or ["--vllm"])
        raise ConfigError(f"{given!r} is for vLLM; give --engine vllm too, or leave it out")
    with suppress(KeyboardInterrupt):  # the usual way to end it, also before it is up
        servers = check_vllm(options) if is_vllm else []
        lines = [f"{each.name} at {each.url}" for each in servers] if is_vllm else _check(options)
        _serve(options, lines, servers)


def check_vllm(options: DeploymentOptions) -> list[VllmServer]:
    """Raises on what can be refused before a process starts; returns the servers."""
    if not options.decodes:
        raise ConfigError("--engine vllm needs --decode: without it there is nothing to hand over")
    for name in BATON_ONLY:
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for Baton's own engine; give vLLM's own options after --")
    if options.tls is not None:
        raise ConfigError(
            "--tls-cert: the servers of `baton up --engine vllm` speak plain HTTP on loopback; for TLS start "
            "`vllm serve` and `baton route` yourself"
        )
    _check_router(options)
    return plan_servers(options.instances, settings.gpus())


def _check(options: DeploymentOptions) -> list[str]:
    """Raises on what can be refused before a process starts; returns a line per planned pair."""
    from baton.engine.deployment import FIRST_TOKEN

    if options.first_token is not None and options.first_token not in FIRST_TOKEN:
        raise ConfigError(
            f"--first-token {options.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
        )
    _check_router(options)
    instances = plan_instances(options)
    pairs = [pair_line(*pair) for pair in plan_pairs(options, instances)]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in (*map(str, instances), *(f"planned {pair}" for pair in pairs)):
        console.print(Text(line, style="dim"))
    return pairs or [f"{each.name} ({each.spec.layout}) prefills and decodes by itself" for each in instances]


def _check_router(options: DeploymentOptions) -> None:
    if options.policy is not None and options.policy not in policy_names():
        raise ConfigError(f"--policy {options.policy!r} is not known; use {', '.join(policy_names())}")
    keys = settings.api_keys(None if options.api_key_file is None else str(options.api_key_file))
    check_binding(options.host, has_api_key=bool(keys), has_secret=True)
    check_port(options.host, options.port)


def check_port(host: str, port: int) -> None:
    """Raises EngineError if the port is in use, which the router would report minutes later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
            ) from None


def _serve(options: DeploymentOptions, lines: list[str], servers: list[VllmServer]) -> None:
    with Deployment(options) as deployment:
        is_interrupted = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            """The first signal ends the deployment in order, the second at once."""
            nonlocal is_interrupted
            if is_interrupted:
                deployment.hurry()
                return
            is_interrupted = True
            raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        try:
            deployment.start(servers)
            print(f"serving {options.model_name} at {deployment.url}")
            for line in lines:
                print(f"  {line}")
            print(f"ask it with: {chat_command(deployment.url, options)}")
            print(f"or with:     {curl_command(deployment.url, options)}", flush=True)
            deployment.wait_failure()
        finally:
            is_interrupted = True
            text = "finishing running requests; interrupt again to end at once"
            deployment.console.print(Text(text, style="dim"))


def chat_command(url: str, options: DeploymentOptions) -> str:
    """A `baton chat` command for this deployment."""
    key_file = options.api_key_file
    words = [f"baton chat --url {url}"]
    words += [f"--api-key-file {shlex.quote(str(key_file))}"] if key_file else []
    words += [f"--tls-ca {shlex.quote(options.tls.authority)}"] if options.tls else []
    return " ".join(words)


def curl_command(url: str, options: DeploymentOptions) -> str:
    """A curl command for this deployment."""
    body = {"model": options.model_name, "messages": [{"role": "user", "content": EXAMPLE}], "stream": True}
    ca = ["--cacert", shlex.quote(options.tls.authority)] if options.tls else []
    words = ["curl", *ca, "-N", f"{url}/v1/chat/completions", "-H", "'Content-Type: application/json'"]
    if options.api_key_file is not None:
        words += ["-H", f'"Authorization: Bearer $(head -n 1 {shlex.quote(str(options.api_key_file))})"']
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])
