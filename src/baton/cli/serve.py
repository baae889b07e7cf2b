"""`baton serve`: one instance behind HTTP. Its URL goes to stdout, everything else to stderr."""

from __future__ import annotations

import gc
import ipaddress
import re
from pathlib import Path
from typing import Literal

from baton.cli.options import (
    API_KEY_FILE,
    DRAIN_S,
    HOST,
    PORT,
    SECRET_FILE,
    InstanceOptions,
    ServerOptions,
)
from baton.cli.parser import command, engine_fields, like, option
from baton.errors import ConfigError


@command
def serve(
    *,
    role: Literal["prefill", "decode", "both"] = option("both", None, "what the instance does"),
    layout: str | None = option(
        None, "LAYOUT", "parallel layout, like pp2.tp2 (default: from -tp, -pp and -dp)"
    ),
    tensor_parallel_size: int = option(1, "N", "tensor parallel size", "-tp", min=1),
    pipeline_parallel_size: int = option(1, "N", "pipeline parallel size", "-pp", min=1),
    data_parallel_size: int = option(
        1, "N", "data parallel size; as in vLLM, -dp 2 -tp 4 are 8 ranks", "-dp", min=1
    ),
    port: int = like(PORT, 8000, "HTTP port; 0: any free port"),
    host: str = like(HOST, "127.0.0.1", "address to bind, for HTTP and the control plane"),
    registry: str | None = option(
        None, "URL", "registry to join, so that routers and peers find the instance"
    ),
    bootstrap_port: int = like(PORT, 0, "port of the coordinator; 0: any free port"),
    name: str | None = option(None, "NAME", "instance name (default: from role, host and port)"),
    drain_s: float = DRAIN_S,
    api_key_file: Path | None = API_KEY_FILE,
    secret_file: Path | None = SECRET_FILE,
    instance: InstanceOptions,
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP; as a prefill or decode instance it hands KV caches over to its peers."""
    # What follows takes longer to import than --help may take; torch waits until all is checked.
    from baton import settings
    from baton.cli.checks import check_first, check_transport

    sizes = {"dp": data_parallel_size, "pp": pipeline_parallel_size, "tp": tensor_parallel_size}
    axes = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]  # numbered as in vLLM
    if layout is not None and axes:
        raise ConfigError(f"give either --layout ({layout}) or -tp, -pp and -dp ({'.'.join(axes)}), not both")
    layout = layout or ".".join(axes) or "tp1"
    check_first(instance.model, [layout], instance.dtype, registry)
    settings.check_port(host, port)
    check_transport(instance.transport)
    import asyncio

    from baton.cli.logs import set_up_logs
    from baton.engine.config import EngineConfig, check_config, worker_modules
    from baton.plan.layout import parse_layout

    tls = server.tls()
    is_reached_by_peers = role != "both" or registry is not None
    _check_host(host, is_reached_by_peers)
    secret = b""
    if is_reached_by_peers or secret_file is not None or settings.has_secret():
        secret = settings.secret(secret_file)
    config = EngineConfig(
        layout=layout,
        name=name or re.sub(r"[^\w.-]", "-", f"{role}-{host}-{port}"),
        role=role,
        secret=secret,
        host=host,
        port=bootstrap_port,
        tls=tls,
        registry=registry,
        **engine_fields(instance),
    )
    check_config(config)
    keys = settings.api_keys(api_key_file)
    settings.check_binding(host, has_api_key=bool(keys), has_secret=bool(secret))
    from baton.fork_server import FORK_SERVERS

    # Server and workers share one import of torch.
    num_threads = settings.default_threads(parse_layout(layout).num_ranks)
    FORK_SERVERS.fork_early(settings.rank_environment(num_threads), worker_modules(instance.model))
    from baton.engine.sizes import check_machine
    from baton.serving.server import ServerConfig
    from baton.serving.server import serve as run_server

    check_machine(config)  # before the server listens and prints its URL
    served = ServerConfig(
        config,
        host,
        port,
        keys,
        instance.first_token,
        drain_s,
        served_model_name=instance.served_model_name or "",
        tool_call_parser=instance.tool_call_parser,
        tls=tls,
    )
    set_up_logs(server.log_level, server.log_format)
    try:
        asyncio.run(run_server(served, lambda line: print(line, flush=True)))
    finally:
        gc.freeze()  # a last collection over all of torch would take seconds


def _check_host(host: str, is_reached_by_peers: bool) -> None:
    """Peers are sent the address that is bound, so it must be a real one."""
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    if is_any and is_reached_by_peers:
        raise ConfigError(
            f"host {host!r} is not an address that peers can connect to; name this machine's own address"
        )
