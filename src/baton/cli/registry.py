"""`baton registry`: where instances find each other."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.session.registry.server import HOST, PORT, RegistryServer


def registry(
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="0 takes a free one")] = PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="where to listen")] = HOST,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="shared by all instances; default: BATON_SECRET")
    ] = None,
) -> None:
    """Runs a registry until it is interrupted; members that lose it come back by themselves."""
    secret = settings.secret(None if secret_file is None else str(secret_file))
    asyncio.run(_serve(RegistryServer(secret), host, port))


async def _serve(server: RegistryServer, host: str, port: int) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await server.start(host, port)
    print(f"registry at {server.url}", flush=True)
    try:
        await ended.wait()
    finally:
        await server.close()
