"""`baton route`: routes requests to prefill and decode instances."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton import settings
from baton.cli.logs import set_up_logs
from baton.cli.options import (
    ApiKeyFile,
    DrainS,
    Host,
    LocalPrefillMax,
    LogFormat,
    LogLevel,
    Port,
    RouterPolicy,
    SecretFile,
    TlsCa,
    TlsCert,
    TlsKey,
)
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.serving.router import Router


def route(
    *,
    registry: Annotated[str | None, typer.Option(metavar="URL", help="registry of the instances")] = None,
    engine: Annotated[
        Literal["baton", "vllm"], typer.Option(help="what the instances run: Baton's own engine, or vLLM")
    ] = "baton",
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL,source=HOST:KV_PORT[,dp=N]",
            help="a vLLM server that prefills, and where its connector listens; may be repeated",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL[,dp=N]", help="a vLLM server that decodes; may be repeated"),
    ] = None,
    port: Port = 8000,
    host: Host = settings.LOOPBACK,
    policy: Annotated[RouterPolicy, typer.Option(help="how to pick an instance")] = "least_loaded",
    prefill_policy: Annotated[
        RouterPolicy | None, typer.Option(help="policy for prefill instances (default: --policy)")
    ] = None,
    decode_policy: Annotated[
        RouterPolicy | None, typer.Option(help="policy for decode instances (default: --policy)")
    ] = None,
    local: Annotated[
        Literal["auto", "never", "always"],
        typer.Option(help="which prompts a decode instance prefills itself"),
    ] = "auto",
    local_prefill_max: LocalPrefillMax = None,
    first_token: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="which side streams the first token (default: as the instances are set)"),
    ] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, metavar="N", help="maximum running requests per instance")
    ] = 256,
    waiting: Annotated[
        int, typer.Option(min=0, metavar="N", help="maximum waiting requests; more are refused with 429")
    ] = 1024,
    silence_s: Annotated[
        float,
        typer.Option(
            min=0.5, metavar="S", help="seconds without a response until an instance counts as lost"
        ),
    ] = 10.0,
    stall_s: Annotated[
        float,
        typer.Option(
            min=0.5, metavar="S", help="seconds without a token until a stream is resumed on another instance"
        ),
    ] = 60.0,
    drain_s: DrainS = 30.0,
    api_key_file: ApiKeyFile = None,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    print_key: Annotated[
        bool,
        typer.Option("--print-key", help="print the key that instances trust a stock PD router by, and exit"),
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Route requests until interrupted; SIGTERM drains first. Instances may come and go."""
    if print_key:
        from baton.serving.http import router_key

        print(router_key(settings.secret(None if secret_file is None else str(secret_file))))
        return
    is_vllm = engine == "vllm"
    if not is_vllm and (prefill or decode):
        raise ConfigError("--prefill and --decode name vLLM servers; give --engine vllm too, or --registry")
    if registry is None and not (is_vllm and prefill and decode):
        remedy = "--registry URL, or a --prefill and a --decode" if is_vllm else "--registry URL"
        raise ConfigError(f"the router does not know its instances; give {remedy}")
    if local_prefill_max is not None and local != "auto":
        raise ConfigError(
            f"--local-prefill-max {local_prefill_max} has no effect with --local {local}; give one of them"
        )
    if is_vllm and first_token is not None:
        raise ConfigError(f"--first-token {first_token}: with vLLM decode has the first token; leave it out")
    secret = None
    if registry is not None:
        secret = settings.secret(None if secret_file is None else str(secret_file))
    keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
    settings.check_binding(host, has_api_key=bool(keys), has_secret=True)
    settings.check_port(host, port)
    # What follows takes longer to import than a mistake, or --help, may take.
    from baton.serving.http import Credentials
    from baton.serving.router import LocalMode, Router, RouterConfig, RouterLimits
    from baton.serving.vllm import parse_instance
    from baton.session.registry import Role

    config = RouterConfig(
        registry=registry,
        engine=engine,
        instances=(
            *(roster for text in prefill or () for roster in parse_instance(Role.PREFILL, text)),
            *(roster for text in decode or () for roster in parse_instance(Role.DECODE, text)),
        ),
        instance_key=settings.vllm_key() if is_vllm else None,
        prefill_policy=prefill_policy or policy,
        decode_policy=decode_policy or policy,
        local=LocalMode(local),
        local_prefill_max=local_prefill_max,
        first_token=first_token or "",
        limits=RouterLimits(
            num_in_flight_max=in_flight,
            num_waiting_max=waiting,
            silence_s_max=silence_s,
            stall_s_max=stall_s,
        ),
        tls=settings.tls_files(tls_cert, tls_key, tls_ca),
    )
    set_up_logs(log_level, log_format)
    asyncio.run(_route(partial(Router, config, secret, Credentials(keys, secret)), (host, port), drain_s))


async def _route(make: Callable[[], Router], where: tuple[str, int], drain_s: float) -> None:
    interrupted, terminated, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def terminate() -> None:
        (interrupted if terminated.is_set() else terminated).set()

    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    router = make()
    await router.start(*where)
    print(f"routing at {router.url}", flush=True)
    gc.freeze()  # collecting over what stays for good would delay requests
    ends = [asyncio.create_task(end) for end in (interrupted.wait(), router.wait())]
    try:
        await _first(*ends, asyncio.create_task(terminated.wait()))
        if terminated.is_set():
            await _first(*ends, asyncio.create_task(router.drain(drain_s)))
    finally:
        for task in ends:
            task.cancel()
        await router.close()


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Waits until one of these is done; raises its exception."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
