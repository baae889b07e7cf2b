"""Options that several commands have, with one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from baton.cli.logs import Form, Level

RouterPolicy: TypeAlias = Literal["least_loaded", "prefix_aware", "round_robin"]
"""Those of baton.serving.policies, whose import would keep --help waiting."""
Model: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="checkpoint folder, id of a model in the Hugging Face cache (org/name), .gguf file, demo, or "
        "dummy:CARD",
    ),
]
Transport: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="KV transfer transport: NAME or NAME:OPTION=VALUE")
]
Overlap: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="layer-group policy: cost, fixed:N, off or adaptive; adaptive takes settings, as "
        "adaptive:min_tokens=3072 and, after commas, max_iters=10, min_iters=4, saturation=3",
    ),
]
FirstToken: TypeAlias = Annotated[
    Literal["prefill", "decode"],
    typer.Option(help="which side streams the first token; decode does it after the hand-over"),
]
Device: TypeAlias = Annotated[
    str, typer.Option(metavar="DEVICE", help="cpu, cuda, or auto: cuda where torch sees a GPU")
]
ServedModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="model name in the API, for requests and responses (default: --model)"),
]
NoPrefixCaching: TypeAlias = Annotated[
    bool, typer.Option("--no-prefix-caching", help="do not reuse the KV cache of common prompt prefixes")
]
LocalPrefillMax: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="most prompt tokens that a decode instance prefills itself where that is sooner; 0: always hand "
        "over (default: one chunk of decode)",
    ),
]
Draft: TypeAlias = Annotated[
    bool, typer.Option("--draft", help="speculative decoding with the model's own draft (MTP) layer")
]
DrainS: TypeAlias = Annotated[
    float, typer.Option(min=0, metavar="S", help="seconds to finish running requests after SIGTERM")
]
ApiKeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="API keys of clients, one per line (default: BATON_API_KEY)"),
]
SecretFile: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="secret shared by all instances (default: BATON_SECRET)")
]
TlsCert: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM certificate, to serve over TLS")
]
TlsKey: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate")]
TlsCa: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM authority that peers are verified by")
]
Link: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="SPEED", help="throttle each prefill rank's link, like 50MB/s (default: no limit)"),
]
PrefillArgs: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ARGS", help="`baton serve` (or `vllm serve`) options of the prefill side only"),
]
DecodeArgs: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ARGS", help="`baton serve` (or `vllm serve`) options of the decode side only"),
]
Verify: TypeAlias = Annotated[
    bool, typer.Option("--verify", help="verify handed-over KV caches with checksums")
]
EndpointProcess: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--endpoint-process/--no-endpoint-process",
        help="run KV transfers of each rank in a process of their own (default: on a GPU)",
    ),
]
LogLevel: TypeAlias = Annotated[Level, typer.Option(help="least severe messages that are logged")]
LogFormat: TypeAlias = Annotated[
    Form, typer.Option(help="log lines as text or as one JSON object each, on stderr")
]
Port: TypeAlias = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="port; 0: any free port")
]
Host: TypeAlias = Annotated[str, typer.Option(metavar="ADDRESS", help="address to bind")]
UrlTlsCa: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM authority of an https URL (default: the system's)")
]
