"""`baton bench overlap`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.bench.options import (
    Device,
    Dtype,
    Json,
    Model,
    Page,
    Png,
    Transport,
    check_names,
    late,
    progress_bar,
    result_path,
)


def overlap(
    *,
    model: Model = "demo",
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="layout that prefills")] = "tp1",
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="layout that decodes")] = "tp1",
    tokens: Annotated[str, typer.Option(metavar="N,...", help="prompt lengths")] = "256,512,1024",
    link: Annotated[
        str,
        typer.Option(
            metavar="SPEED,...",
            help="of each source rank, like 12.5GB/s; full: none; auto: transfer takes as long as compute",
        ),
    ] = "auto",
    policy: Annotated[
        str, typer.Option(metavar="P,...", help="off, cost, adaptive and fixed:N")
    ] = "off,fixed:4,adaptive,cost",
    dtype: Dtype = "fp32",
    device: Device = "cpu",
    transport: Transport = "shm",
    chunk: Annotated[int, typer.Option(min=0, metavar="N", help="tokens of a prefill chunk; 0: all")] = 0,
    page: Page = 16,
    threads: Annotated[int, typer.Option(min=0, metavar="N", help="of each rank; 0: derived")] = 0,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="hand-overs of each kind")] = 5,
    json: Json = None,
    png: Png = None,
) -> None:
    """Measures how much of a hand-over each policy hides behind prefill, against compute alone."""
    options = late("overlap.options")
    wanted = options.Options(
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=options.parse_lengths(tokens),
        links=tuple(link.split(",")),
        policies=tuple(policy.split(",")),
        dtype=dtype,
        device=device,
        repeats=repeat,
        chunk_tokens=chunk,
        page_tokens=page,
        num_threads=threads,
        transport=transport,
    )
    check_names(transport)
    shown = late("overlap.shown")
    shown.check(wanted)
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)
        found = shown.measure(
            wanted,
            lambda total, text: progress.update(task, total=total, advance=1, description=text),
        )
    shown.show(found, wanted, result_path("overlap", json), png)
    if not found.is_right:
        raise typer.Exit(1)
