"""`baton route`: gives requests to pairs of instances."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from baton import settings
from baton.serving.http import Credentials, check_binding
from baton.serving.policies import policy_names
from baton.serving.router import Router
from baton.serving.router_config import LocalMode, RouterConfig, RouterLimits

PORT = 8000
HOST = "127.0.0.1"
DRAIN_S = 30.0
_POLICIES = "|".join(policy_names())
_LIMITS = RouterLimits()


def route(
    *,
    registry: Annotated[str, typer.Option(metavar="URL", help="where instances register")],
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="0 takes a free one")] = PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="where to listen")] = HOST,
    policy: Annotated[str, typer.Option(metavar=_POLICIES, help="who gets a request")] = "least_loaded",
    prefill_policy: Annotated[
        str, typer.Option(metavar="POLICY", help="another one for prefill instances")
    ] = "",
    decode_policy: Annotated[
        str, typer.Option(metavar="POLICY", help="another one for decode instances")
    ] = "",
    local: Annotated[
        LocalMode, typer.Option(help="which prompts decode instances prefill themselves")
    ] = LocalMode.AUTO,
    first_token: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="whose first token is streamed; default: as instances are set"),
    ] = None,
    in_flight: Annotated[
        int, typer.Option(min=1, metavar="N", help="requests that one instance is given at a time")
    ] = _LIMITS.num_in_flight_max,
    waiting: Annotated[
        int, typer.Option(min=0, metavar="N", help="requests that wait here; more are refused with 429")
    ] = _LIMITS.num_waiting_max,
    silence_s: Annotated[
        float,
        typer.Option(min=0.5, metavar="S", help="an instance that says nothing for so long is given up"),
    ] = _LIMITS.silence_s_max,
    stall_s: Annotated[
        float, typer.Option(min=0.5, metavar="S", help="a stream that stands for so long goes on elsewhere")
    ] = _LIMITS.stall_s_max,
    drain_s: Annotated[
        float, typer.Option(min=0, metavar="S", help="after SIGTERM, for requests under way")
    ] = DRAIN_S,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="keys of clients, one a line; default: BATON_API_KEY")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="shared by all instances; default: BATON_SECRET")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate: serve over TLS")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM authority that peers are verified by")
    ] = None,
) -> None:
    """Routes requests until it is interrupted, or drained by SIGTERM; instances come and go."""
    config = RouterConfig(
        registry=registry,
        prefill_policy=prefill_policy or policy,
        decode_policy=decode_policy or policy,
        local=local,
        first_token=first_token or "",
        limits=RouterLimits(
            num_in_flight_max=in_flight,
            num_waiting_max=waiting,
            silence_s_max=silence_s,
            stall_s_max=stall_s,
        ),
        tls=settings.tls_files(tls_cert, tls_key, tls_ca),
    )
    secret = settings.secret(None if secret_file is None else str(secret_file))
    credentials = Credentials(settings.api_keys(None if api_key_file is None else str(api_key_file)), secret)
    check_binding(host, has_api_key=credentials.has_api_key, has_secret=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(_route(partial(Router, config, secret, credentials), (host, port), drain_s))


async def _route(make: Callable[[], Router], where: tuple[str, int], drain_s: float) -> None:
    interrupted, terminated, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def terminate() -> None:
        (interrupted if terminated.is_set() else terminated).set()

    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    router = make()
    await router.start(*where)
    print(f"routing at {router.url}", flush=True)
    gc.freeze()  # what is there now stays: looking through it again and again would delay requests
    ends = [asyncio.create_task(each) for each in (interrupted.wait(), router.wait())]
    try:
        await _first(*ends, asyncio.create_task(terminated.wait()))
        if terminated.is_set():
            await _first(*ends, asyncio.create_task(router.drain(drain_s)))
    finally:
        for task in ends:
            task.cancel()
        await router.close()


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Until one of these is done; raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
