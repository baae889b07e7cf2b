"""`baton registry`: lets instances and routers find each other."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.session.registry.server import HOST, PORT, RegistryServer


def registry(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="port; 0: any free port")
    ] = PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="address to bind")] = HOST,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="secret shared by all instances (default: BATON_SECRET)"),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate, to serve over TLS")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM authority that peers are verified by")
    ] = None,
) -> None:
    """Run a registry until interrupted; instances that lose it register again by themselves."""
    secret = settings.secret(None if secret_file is None else str(secret_file))
    tls = settings.tls_files(tls_cert, tls_key, tls_ca)
    server = RegistryServer(secret, ssl_context=None if tls is None else tls.accepting())
    asyncio.run(_serve(server, host, port))


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
