"""`baton demo`: a hand-over of a real model, or of a synthetic cache, on this machine."""

from __future__ import annotations

from pathlib import Path

from baton.cli.options import MODEL
from baton.cli.parser import command, flag, like, option
from baton.errors import ConfigError


@command
def demo(
    *,
    model: str = like(MODEL, "demo", "checkpoint with a tokenizer, as for generate; demo: downloaded once"),
    prefill: str = option("pp2", "LAYOUT", "layout of the prefill instance"),
    decode: str = option("tp3", "LAYOUT", "layout of the decode instance"),
    tokens: int = option(1500, "N", "maximum tokens of the long document", min=1),
    max_tokens: int = option(64, "N", "maximum tokens of each answer", min=2),
    out: Path = option(Path("baton-demo"), "DIR", "folder for the timeline picture and the Perfetto trace"),
    cache: bool = flag("hand a synthetic cache over in memory instead, without a model"),
) -> int:
    """Answer questions with prefill and decode in different layouts, and check that all tokens are equal."""
    # What follows takes longer to import than a mistake, or --help, may take.
    if cache:
        from baton.cli.demo_cache import demo_cache

        return demo_cache()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    from baton.cli.checks import check_first

    check_first(model, [prefill, decode])
    from baton.cli.demo_model import demo_model

    return demo_model(model, prefill, decode, tokens, max_tokens, out)
