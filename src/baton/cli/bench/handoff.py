"""`baton bench handoff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench.handoff.run import Options, check
from baton.bench.handoff.scene import Scene, Side, parse_speed
from baton.bench.handoff.shown import measure_control, measure_one, measure_sweep
from baton.cli.bench.options import Page, Transport, check_names, progress_bar, result_path
from baton.errors import ConfigError


def handoff(
    *,
    source: Annotated[str, typer.Option("--from", metavar="LAYOUT", help="layout that prefills")] = "pp2.tp2",
    target: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="layout that will decode")] = "tp4",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="as for baton plan")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="tokens of the prompt")] = 8192,
    transport: Transport = "shm",
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="of each source rank, like 12.5GB/s; default: none")
    ] = None,
    layer_ms: Annotated[
        float | None, typer.Option(min=0, metavar="MS", help="compute of one layer of the whole prompt")
    ] = None,
    ratio: Annotated[
        float, typer.Option(min=0, metavar="R", help="compute by serial transfer time, without --layer-ms")
    ] = 1.0,
    policy: Annotated[str, typer.Option(metavar="P", help="cost, adaptive, fixed:N or off")] = "cost",
    chunk: Annotated[int, typer.Option(min=0, metavar="N", help="tokens of a prefill chunk; 0: all")] = 0,
    page: Page = 64,
    dtype: Annotated[str, typer.Option(metavar="D", help="element type, or FROM:TO")] = "bf16",
    storage: Annotated[str, typer.Option(metavar="S", help="as for baton plan, or FROM:TO")] = "hnd",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="hand-overs, each compared")] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="checksums from end to end")] = False,
    control: Annotated[bool, typer.Option("--control", help="control time of tiny transfers")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="every policy, from little compute to much")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="where to write the results")] = None,
) -> None:
    """Hands a cache over between real processes, paced like a prefill, and compares every byte."""
    if control and sweep:
        raise ConfigError("--control and --sweep are two measurements; give one of them")
    check_names(transport)
    dtypes, storages = _both(dtype), _both(storage)
    scene = Scene(
        model,
        Side(source, page, storages[0], dtypes[0]),
        Side(target, page, storages[1], dtypes[1]),
        tokens,
        transport=transport,
        link_bytes_per_s=parse_speed(link) if link else 0.0,
    )
    layer_s = None if layer_ms is None else layer_ms / 1e3
    options = Options(policy, layer_s, ratio, chunk, repeat, verify)
    check(scene, options)
    measure = measure_control if control else measure_sweep if sweep else measure_one
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)
        found = measure(scene, options, lambda text: progress.update(task, description=text))
    found.show(Console(), result_path(found.name, None if out is None else out / f"{found.name}.json"))
    if not found.is_right:
        raise typer.Exit(1)


def _both(text: str) -> tuple[str, str]:
    """What holds for the source and for the target."""
    first, _, second = text.partition(":")
    return first, second or first
