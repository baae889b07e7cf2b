"""`baton bench engine`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from baton.cli.bench.options import Device, Dtype, Json, Model, Png, late, progress_bar, result_path


def engine(
    *,
    model: Model = "demo",
    dtype: Dtype = "fp32",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(min=0, metavar="N", help="of both; 0: the machine's cores")] = 0,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="tokens of the prompt")] = 512,
    answer: Annotated[int, typer.Option(min=2, metavar="N", help="tokens of each answer")] = 64,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="decoded at once")] = 8,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="turns of each kind")] = 5,
    json: Json = None,
    png: Png = None,
) -> None:
    """Measures prefill and decode against transformers on the same checkpoint, taking turns."""
    wanted = late("engine.options").Options(
        model=model,
        dtype=dtype,
        device=device,
        num_threads=threads or os.cpu_count() or 1,
        num_prompt=tokens,
        num_decoded=answer,
        num_requests=requests,
        repeats=repeat,
    )
    shown = late("engine.shown")
    shown.check(wanted)
    with progress_bar() as progress:
        task = progress.add_task("starting", total=None)
        found = shown.measure(
            wanted,
            lambda total, text: progress.update(task, total=total, advance=1, description=text),
        )
    shown.show(found, wanted, result_path("engine", json), png)
