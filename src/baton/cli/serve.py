"""`baton serve`: one instance behind HTTP."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.protocol.timings import Timings
from baton.settings import Tls

HOST, PORT = "127.0.0.1", 8000
QUEUE = 256


@dataclass(frozen=True, slots=True)
class Where:
    """How it is reached, and by whom."""

    host: str
    port: int
    registry: str | None
    bootstrap_port: int
    api_key_file: Path | None
    secret_file: Path | None
    drain_s: float
    silence_s: float
    tls: Tls | None


@dataclass(frozen=True, slots=True)
class What:
    """What is served."""

    model: str
    role: str
    layout: str
    name: str | None
    transport: str
    link: str | None
    overlap: str
    first_token: str
    dtype: str
    device: str
    has_draft: bool = False


@dataclass(frozen=True, slots=True)
class Sizing:
    """How much of it; 0 where it is derived."""

    pool_tokens: int
    page_tokens: int
    context: int
    chunk_tokens: int
    queue: int


def serve(
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="a folder, a .gguf file, demo, or dummy:CARD")
    ],
    role: Annotated[str, typer.Option(metavar="ROLE", help="prefill, decode or both")] = "both",
    layout: Annotated[str, typer.Option(metavar="LAYOUT", help="as pp2.tp2")] = "tp1",
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="0 takes a free one")] = PORT,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="where to listen, HTTP and control plane")
    ] = HOST,
    registry: Annotated[
        str | None, typer.Option(metavar="URL", help="where routers and peers find it; default: nowhere")
    ] = None,
    bootstrap_port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="N", help="of the coordinator; 0 takes a free one")
    ] = 0,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="of the instance; default: by role, host and port")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE")] = "shm",
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="of each rank, like 50MB/s; default: none")
    ] = None,
    overlap: Annotated[str, typer.Option(metavar="P", help="cost, adaptive, fixed:N or off")] = "cost",
    first_token: Annotated[
        str, typer.Option(metavar="SIDE", help="prefill: as soon as it is there; decode: once admitted")
    ] = "prefill",
    pool_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="of cache; 0: derived")] = 0,
    page_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="of a page")] = 16,
    context: Annotated[int, typer.Option(min=0, metavar="N", help="prompt and answer; 0: derived")] = 0,
    chunk_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="prefilled in one step")] = 512,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="requests that may wait")] = QUEUE,
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda")] = "cpu",
    draft: Annotated[
        bool, typer.Option("--draft", help="guess a token ahead by the model's own draft layer")
    ] = False,
    drain_s: Annotated[float, typer.Option(min=0, metavar="S", help="for open requests, at the end")] = 30.0,
    silence_s: Annotated[
        float, typer.Option(metavar="S", help="before a rank or peer that says nothing counts as lost")
    ] = Timings().silence_s,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="keys of clients; default: BATON_API_KEY")
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
    """Serves a model over HTTP; as prefill or decode it is one side of hand-overs."""
    tls = settings.tls_files(tls_cert, tls_key, tls_ca)
    # The engine brings torch along, which other verbs and --help need not wait for.
    heavy = importlib.import_module("baton.cli.engine.serve")
    heavy.run(
        Where(host, port, registry, bootstrap_port, api_key_file, secret_file, drain_s, silence_s, tls),
        What(model, role, layout, name, transport, link, overlap, first_token, dtype, device, draft),
        Sizing(pool_tokens, page_tokens, context, chunk_tokens, queue),
    )
