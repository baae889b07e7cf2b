"""`baton demo`: a real model, prefilled in one layout and decoded in another, proven and timed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.demo_cache import demo_cache
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Show:
    """What the demo shows."""

    model: str
    prefill: str
    decode: str
    num_tokens: int
    max_tokens: int
    folder: Path


def demo(
    *,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="as for generate, with a tokenizer; demo: fetched once")
    ] = "demo",
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="layout that prefills")] = "pp2",
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="layout that decodes")] = "tp3",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="of the long document, at most")] = 1500,
    max_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="of each answer, at most")] = 64,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="where the timeline and the trace are written")
    ] = Path("baton-demo"),
    cache: Annotated[
        bool, typer.Option("--cache", help="a made-up cache in memory instead, without a model")
    ] = False,
) -> None:
    """Answers with a model whose prefill and decode run in unlike layouts, and proves the tokens equal."""
    if cache:
        demo_cache()
        return
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    # The engine brings torch along, which other verbs and --help need not wait for.
    heavy = importlib.import_module("baton.cli.engine.demo")
    if not heavy.run(Show(model, prefill, decode, tokens, max_tokens, out)):
        raise typer.Exit(1)
