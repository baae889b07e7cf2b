"""Carries `baton serve` out: the URL on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import re
import sys
from pathlib import Path

from baton import settings
from baton.bench.handoff.scene import parse_speed
from baton.cli.serve import Sizing, What, Where
from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.serving.server import ServerConfig, serve


def run(where: Where, what: What, sizing: Sizing) -> None:
    """Serves until it is told to stop."""
    config = serve_config(where, what, sizing)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("baton.serving.server").setLevel(logging.INFO)
    try:
        asyncio.run(serve(config, lambda line: print(line, flush=True)))
    finally:
        # All of torch and its kin is about to go at once: looking for cycles in it takes seconds.
        gc.freeze()


def serve_config(where: Where, what: What, sizing: Sizing) -> ServerConfig:
    """What the options come to; refused here if it cannot be."""
    _check_host(where, what)
    instance = EngineConfig(
        model=what.model,
        layout=what.layout,
        name=what.name or re.sub(r"[^\w.-]", "-", f"{what.role}-{where.host}-{where.port}"),
        role=what.role,
        secret=_secret(where, what),
        dtype=what.dtype,
        device=what.device,
        page_tokens=sizing.page_tokens,
        pool_tokens=sizing.pool_tokens,
        context_max=sizing.context,
        chunk_tokens=sizing.chunk_tokens,
        transport=what.transport,
        link_bytes_per_s=parse_speed(what.link) if what.link else 0.0,
        policy=what.overlap,
        host=where.host,
        port=where.bootstrap_port,
        tls=where.tls,
        registry=where.registry,
        queue_max=sizing.queue,
        silence_s=where.silence_s,
        has_draft=what.has_draft,
    )
    keys = settings.api_keys(_text(where.api_key_file))
    return ServerConfig(
        instance, where.host, where.port, keys, what.first_token, where.drain_s, tls=where.tls
    )


def _secret(where: Where, what: What) -> bytes:
    """An instance that hands nothing over and is in no registry needs none."""
    is_needed = what.role != "both" or where.registry is not None
    if is_needed or where.secret_file is not None or settings.has_secret():
        return settings.secret(_text(where.secret_file))
    return b""


def _check_host(where: Where, what: What) -> None:
    """Others are told the address that is listened on, so it has to be one."""
    try:
        is_any = ipaddress.ip_address(where.host).is_unspecified
    except ValueError:
        is_any = not where.host
    if is_any and (what.role != "both" or where.registry is not None):
        raise ConfigError(
            f"host {where.host!r} is no address that others can be told; name this machine's own"
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
