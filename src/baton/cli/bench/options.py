"""What the benchmarks' commands share: options, progress, and where results go."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from baton.cli.doctor import check_transport
from baton.errors import ConfigError
from baton.transport import parse_transport, transport_names

RESULTS = Path("benchmarks/results")

Device = Annotated[str, typer.Option(metavar="D", help="cpu or cuda")]
Dtype = Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")]
Model = Annotated[str, typer.Option("--model", metavar="MODEL", help="demo, a checkpoint, or dummy:CARD")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")]
Page = Annotated[int, typer.Option(min=1, metavar="N", help="tokens of a page, on both sides")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="where to draw them")]
Repeats = Annotated[int, typer.Option(min=1, max=1000, help="runs of each measurement")]
Transport = Annotated[str, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE")]


def progress_bar() -> Progress:
    """On stderr, gone when it is done."""
    return Progress(transient=True, console=Console(stderr=True))


def result_path(name: str, out: Path | None) -> Path:
    """Where results go if nobody says so."""
    return out or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"


def late(name: str) -> Any:
    """A benchmark of the engine: torch takes seconds to import, which other commands do without."""
    return importlib.import_module(f"baton.bench.{name}")


def check_names(text: str | None) -> list[str]:
    """The transports that are meant, each able to work here."""
    if text is None:
        return [name for name in transport_names() if check_transport(name).is_ok]
    names = text.split(",")
    for name in names:
        bare, _ = parse_transport(name)
        if bare not in transport_names():
            raise ConfigError(f"transport {bare!r} is not known; use {', '.join(transport_names())}")
        finding = check_transport(bare)
        if not finding.is_ok:
            raise ConfigError(str(finding))
    return names
