"""`baton registry`: lets instances and routers find each other."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from baton import settings
from baton.cli.logs import set_up_logs
from baton.cli.options import HOST, PORT, SECRET_FILE, ServerOptions
from baton.cli.parser import command, like

if TYPE_CHECKING:
    from baton.session.registry import RegistryServer


@command
def registry(
    *,
    port: int = like(PORT, settings.REGISTRY_PORT),
    host: str = HOST,
    secret_file: Path | None = SECRET_FILE,
    server: ServerOptions,
) -> None:
    """Run a registry until interrupted; instances that lose it register again by themselves."""
    secret, tls = settings.secret(secret_file), server.tls()
    settings.check_port(host, port)
    # It takes longer to import than a mistake, or --help, may take.
    from baton.session.registry import RegistryServer

    set_up_logs(server.log_level, server.log_format)
    running = RegistryServer(secret, ssl_context=None if tls is None else tls.accepting())
    asyncio.run(_serve(running, host, port))


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
