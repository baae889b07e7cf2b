"""`baton route`: routes requests to prefill and decode instances."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton import settings
from baton.cli.logs import set_up_logs
from baton.cli.options import (
    API_KEY_FILE,
    DRAIN_S,
    ENGINE,
    FIRST_TOKEN,
    HOST,
    LOCAL,
    LOCAL_PREFILL_MAX,
    POLICY,
    PORT,
    QUEUE_TIMEOUT,
    SECRET_FILE,
    Engine,
    Local,
    RouterPolicy,
    ServerOptions,
    Side,
)
from baton.cli.parser import command, flag, like, option
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.serving.router import Router


@command
def route(
    *,
    registry: str | None = option(None, "URL", "registry of the instances"),
    engine: Engine = ENGINE,
    prefill: tuple[str, ...] = option(
        (),
        "URL,source=HOST:KV_PORT[,dp=N]",
        "a vLLM server that prefills, and where its connector listens; may be repeated",
    ),
    decode: tuple[str, ...] = option((), "URL[,dp=N]", "a vLLM server that decodes; may be repeated"),
    port: int = PORT,
    host: str = HOST,
    policy: RouterPolicy = POLICY,
    prefill_policy: RouterPolicy | None = like(
        POLICY, None, "policy for prefill instances (default: --policy)"
    ),
    decode_policy: RouterPolicy | None = like(
        POLICY, None, "policy for decode instances (default: --policy)"
    ),
    local: Local = LOCAL,
    local_prefill_max: int | None = LOCAL_PREFILL_MAX,
    first_token: Side | None = like(
        FIRST_TOKEN, None, "which side streams the first token (default: as set on the instances)"
    ),
    in_flight: int = option(256, "N", "maximum running requests per instance", min=1),
    waiting: int = option(1024, "N", "maximum waiting requests; more are refused with 429", min=0),
    queue_timeout: float | None = QUEUE_TIMEOUT,
    silence_s: float = option(
        10.0, "S", "seconds without a response until an instance counts as lost", min=0.5
    ),
    stall_s: float = option(
        60.0, "S", "seconds without a token until a stream is resumed on another instance", min=0.5
    ),
    drain_s: float = DRAIN_S,
    api_key_file: Path | None = API_KEY_FILE,
    secret_file: Path | None = SECRET_FILE,
    print_key: bool = flag("print the API key for a stock PD router, and exit"),
    server: ServerOptions,
) -> None:
    """Route requests until interrupted; SIGTERM drains first. Instances may come and go."""
    if print_key:
        from baton.serving.http import router_key

        print(router_key(settings.secret(secret_file)))
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
    if registry is not None:
        settings.check_registry(registry)
    secret = None if registry is None else settings.secret(secret_file)
    keys = settings.api_keys(api_key_file)
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
            *(roster for text in prefill for roster in parse_instance(Role.PREFILL, text)),
            *(roster for text in decode for roster in parse_instance(Role.DECODE, text)),
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
            queue_s_max=queue_timeout,
            silence_s_max=silence_s,
            stall_s_max=stall_s,
        ),
        tls=server.tls(),
    )
    set_up_logs(server.log_level, server.log_format)
    asyncio.run(_route(partial(Router, config, secret, Credentials(keys, secret)), (host, port), drain_s))


async def _route(make: Callable[[], Router], where: tuple[str, int], drain_s: float) -> None:
    from baton.serving.http import run_until_signal

    def on_start(url: str) -> None:
        print(f"routing at {url}", flush=True)
        gc.freeze()  # collecting over what stays for good would delay requests

    router = make()
    await run_until_signal(router, router.start(*where), drain_s, on_start)
