"""`baton up`: a whole deployment on this machine, until it is interrupted."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.cli.deployment.options import LOOPBACK, Engine, Front, Options, layouts

Tokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="as for serve")]


def up(
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="a folder, a .gguf file, demo, or dummy:CARD")
    ],
    prefill: Annotated[
        str, typer.Option(metavar="L[,L...]", help="a layout for each prefill instance, as pp2 or tp2,tp2")
    ],
    decode: Annotated[
        str | None, typer.Option(metavar="L[,L...]", help="the same for decode; default: all do both")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, metavar="N", help="where clients ask")] = 8000,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="where clients ask")] = LOOPBACK,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="keys of clients, one a line; default: BATON_API_KEY")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="P", help="round_robin, least_loaded or prefix_aware")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE; default: shm")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="of each prefill rank, like 50MB/s; default: none")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="P", help="cost (default), adaptive, fixed:N or off")
    ] = None,
    first_token: Annotated[
        str | None, typer.Option(metavar="SIDE", help="prefill (default): at once; decode: when admitted")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="D", help="fp32 (default), bf16 or fp16")] = None,
    device: Annotated[str | None, typer.Option(metavar="D", help="cpu (default) or cuda")] = None,
    page_tokens: Tokens = None,
    pool_tokens: Tokens = None,
    context: Tokens = None,
    chunk_tokens: Tokens = None,
    queue: Annotated[int | None, typer.Option(min=1, metavar="N", help="as for serve")] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="guess a token ahead by the model's own draft layer")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate: serve over TLS")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM authority that peers are verified by")
    ] = None,
) -> None:
    """Starts a registry, prefill and decode instances and a router, and serves until it is interrupted."""
    sizes = (page_tokens, pool_tokens, context, chunk_tokens, queue)
    engine = Engine(transport, overlap, first_token, dtype, device, *sizes, draft)
    front = Front(host, port, policy, api_key_file, tls=settings.tls_files(tls_cert, tls_key, tls_ca))
    sides = layouts("--prefill", prefill), layouts("--decode", decode)
    # The checks bring torch along, which other verbs and --help need not wait for.
    importlib.import_module("baton.cli.deployment.up").run(Options(model, *sides, link, engine, front))
