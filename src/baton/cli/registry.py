"""`baton registry`: lets instances and routers find each other."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from baton import settings
from baton.cli.logs import set_up_logs
from baton.cli.options import Host, LogFormat, LogLevel, Port, SecretFile, TlsCa, TlsCert, TlsKey

if TYPE_CHECKING:
    from baton.session.registry import RegistryServer


def registry(
    *,
    port: Port = settings.REGISTRY_PORT,
    host: Host = settings.LOOPBACK,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run a registry until interrupted; instances that lose it register again by themselves."""
    secret = settings.secret(None if secret_file is None else str(secret_file))
    tls = settings.tls_files(tls_cert, tls_key, tls_ca)
    settings.check_port(host, port)
    # It takes longer to import than a mistake, or --help, may take.
    from baton.session.registry import RegistryServer

    set_up_logs(log_level, log_format)
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
