"""Carries `baton up` out."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress

from baton import settings
from baton.cli.deployment.options import Options
from baton.cli.deployment.pairs import pairs, sides
from baton.cli.deployment.running import Running, running
from baton.cli.deployment.showing import Screen, chat_line, curl_line
from baton.engine.deployment import FIRST_TOKEN
from baton.errors import ConfigError, EngineError
from baton.serving.http import check_binding
from baton.serving.policies import policy_names


def run(options: Options) -> None:
    """Refuses what cannot work, then serves until a signal comes or a part has died for good."""
    screen = Screen()
    with suppress(KeyboardInterrupt):  # which is how people end it, also before it has begun
        planned = _checked(options, screen)
        asyncio.run(_serve(options, screen, planned))


def _checked(options: Options, screen: Screen) -> list[str]:
    """Everything that can be refused before a process is started; the planned pairs, a line each."""
    front, first_token = options.front, options.engine.first_token
    if first_token is not None and first_token not in FIRST_TOKEN:
        raise ConfigError(f"--first-token {first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}")
    if front.policy is not None and front.policy not in policy_names():
        raise ConfigError(f"--policy {front.policy!r} is not known; use {', '.join(policy_names())}")
    keys = settings.api_keys(None if front.api_key_file is None else str(front.api_key_file))
    check_binding(front.host, has_api_key=bool(keys), has_secret=True)
    found = sides(options)
    planned = [each.line() for each in pairs(options, found)]
    check_port(front.host, front.port)
    for side in found:
        screen.print(side.line(), "dim")
    for line in planned:
        screen.print(f"planned {line}", "dim")
    return planned or [f"{side.name} ({side.spec.layout}) prefills and decodes by itself" for side in found]


def check_port(host: str, port: int) -> None:
    """Raises EngineError where somebody listens already, which the router would find out minutes later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"cannot listen on {host}:{port}: {error.strerror}; name another one with --port"
            ) from None


async def _serve(options: Options, screen: Screen, planned: list[str]) -> None:
    async with running(options, screen.say) as deployment:
        served = asyncio.create_task(_served(deployment, screen, planned))
        _on_signals(served, deployment)
        with suppress(asyncio.CancelledError):
            await served
        screen.print("ending what is under way; interrupt again to end at once", "dim")


def _on_signals(served: asyncio.Task[None], deployment: Running) -> None:
    """The first signal ends the deployment in order, the second at once."""

    def end() -> None:
        if not served.cancel():
            deployment.hurry()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)


async def _served(deployment: Running, screen: Screen, planned: list[str]) -> None:
    """Ends by being cancelled, or with the cause for which a part has died for good."""
    with screen.starting() as show:
        await deployment.start()
        await deployment.ready(show)
    options = deployment.options
    print(f"serving {options.model} at {deployment.url}")
    for line in planned:
        print(f"  {line}")
    print(f"ask it with: {chat_line(deployment.url, options)}")
    print(f"or with:     {curl_line(deployment.url, options)}", flush=True)
    await deployment.lost()
