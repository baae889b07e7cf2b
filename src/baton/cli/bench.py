"""`baton bench`: measured claims, each with its command, machine and commit."""

from __future__ import annotations

import importlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench import plan as plan_bench
from baton.bench import transport as transport_bench
from baton.bench.handoff.run import Options, check
from baton.bench.handoff.scene import Scene, Side, parse_speed
from baton.bench.handoff.shown import measure_control, measure_one, measure_sweep
from baton.bench.plot import plot_throughput
from baton.bench.record import write
from baton.bench.sizes import parse_sizes, size_text
from baton.cli.doctor import check_transport
from baton.errors import ConfigError
from baton.transport import parse_transport, transport_names

app = typer.Typer(help="Measures what Baton claims.")

RESULTS = Path("benchmarks/results")
SIZES = "4KiBx256,64KiBx256,1MiBx64"


@app.callback()
def bench() -> None:
    """Measures what Baton claims."""


def _progress() -> Progress:
    return Progress(transient=True, console=Console(stderr=True))


def _path(name: str, out: Path | None) -> Path:
    return out or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"


@app.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="runs of each measurement")] = 7,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
) -> None:
    """Times planning and binding, and counts copies."""
    rows = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=None)
        for row in plan_bench.run(repeats):
            rows.append(row)
            progress.update(task, description=row.name)
    table = Table("measurement", "result", "target", title="baton bench plan")
    for row in rows:
        table.add_row(row.name, row.text, {None: "", True: "met", False: "missed"}[row.is_met])
    Console().print(table)
    path = _path("plan", out)
    write(path, {row.name: {**row.figures, "is_met": row.is_met} for row in rows})
    print(f"written to {path}")


@app.command()
def transport(
    transports: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="comma-separated, NAME or NAME:OPTION=VALUE; default: all"),
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="spans as SIZExCOUNT, comma-separated")] = SIZES,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="runs of each measurement")] = 15,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
) -> None:
    """Measures throughput and latency against memcpy and each transport's own library called bare."""
    wanted, names = parse_sizes(sizes), _names(transports)
    found: list[transport_bench.Result] = []
    waits: list[transport_bench.Latency] = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=len(names) * (1 + len(wanted)))
        for result in transport_bench.run(names, wanted, repeats):
            (found if isinstance(result, transport_bench.Result) else waits).append(result)  # type: ignore[arg-type]
            progress.update(task, advance=1, description=result.transport)
    Console().print(_throughput_table(found))
    Console().print(_latency_table(waits))
    path = _path("transport", out)
    write(path, _record(found, waits))
    print(f"written to {path}")
    picture = path.with_suffix(".png")
    if plot_throughput(found, picture):
        print(f"drawn in {picture}")
    else:
        print("no picture: matplotlib is not installed (pip install 'baton[plot]')")


@app.command()
def handoff(
    *,
    source: Annotated[str, typer.Option("--from", metavar="LAYOUT", help="layout that prefills")] = "pp2.tp2",
    target: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="layout that will decode")] = "tp4",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="as for baton plan")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="tokens of the prompt")] = 8192,
    transport: Annotated[str, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE")] = "shm",
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
    page: Annotated[int, typer.Option(min=1, metavar="N", help="tokens of a page, on both sides")] = 64,
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
    _names(transport)
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
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        found = measure(scene, options, lambda text: progress.update(task, description=text))
    found.show(Console(), _path(found.name, None if out is None else out / f"{found.name}.json"))
    if not found.is_right:
        raise typer.Exit(1)


@app.command()
def overlap(
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="demo, a checkpoint, or dummy:CARD")
    ] = "demo",
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
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda")] = "cpu",
    transport: Annotated[str, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE")] = "shm",
    chunk: Annotated[int, typer.Option(min=0, metavar="N", help="tokens of a prefill chunk; 0: all")] = 0,
    page: Annotated[int, typer.Option(min=1, metavar="N", help="tokens of a page, on both sides")] = 16,
    threads: Annotated[int, typer.Option(min=0, metavar="N", help="of each rank; 0: derived")] = 0,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="hand-overs of each kind")] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="where to draw them")] = None,
) -> None:
    """Measures how much of a hand-over each policy hides behind prefill, against compute alone."""
    options = _late("overlap.options")
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
    _names(transport)
    shown = _late("overlap.shown")
    shown.check(wanted)
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        found = shown.measure(
            wanted,
            lambda total, text: progress.update(task, total=total, advance=1, description=text),
        )
    shown.show(found, wanted, _path("overlap", json), png)
    if not found.is_right:
        raise typer.Exit(1)


@app.command()
def engine(
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="demo, a checkpoint, or dummy:CARD")
    ] = "demo",
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, metavar="N", help="of both; 0: the machine's cores")] = 0,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="tokens of the prompt")] = 512,
    answer: Annotated[int, typer.Option(min=2, metavar="N", help="tokens of each answer")] = 64,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="decoded at once")] = 8,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="turns of each kind")] = 5,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="where to draw them")] = None,
) -> None:
    """Measures prefill and decode against transformers on the same checkpoint, taking turns."""
    wanted = _late("engine.options").Options(
        model=model,
        dtype=dtype,
        device=device,
        num_threads=threads or os.cpu_count() or 1,
        num_prompt=tokens,
        num_decoded=answer,
        num_requests=requests,
        repeats=repeat,
    )
    shown = _late("engine.shown")
    shown.check(wanted)
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        found = shown.measure(
            wanted,
            lambda total, text: progress.update(task, total=total, advance=1, description=text),
        )
    shown.show(found, wanted, _path("engine", json), png)


def _late(name: str) -> Any:
    """A benchmark of the engine: torch takes seconds to import, which other commands do without."""
    return importlib.import_module(f"baton.bench.{name}")


def _both(text: str) -> tuple[str, str]:
    """What holds for the source and for the target."""
    first, _, second = text.partition(":")
    return first, second or first


def _names(text: str | None) -> list[str]:
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


def _throughput_table(found: list[transport_bench.Result]) -> Table:
    table = Table("transport", "spans", "GB/s", "of memcpy", "of its library, bare", title="throughput")
    for result in found:
        ratios = (result.ratio("memcpy"), result.ratio("bare"))
        texts = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        size = size_text(result.span_bytes, result.num_spans)
        table.add_row(result.transport, size, f"{result.bytes_per_s / 1e9:.2f}", *texts)
    return table


def _latency_table(waits: list[transport_bench.Latency]) -> Table:
    heads = ("64 B to Done", "64 B to Landed at the target", "submit of 10,000 spans")
    table = Table("transport", *heads, title="latency, medians")
    for wait in waits:
        keys = ("small_write", "seen_by_target", "submit_10000")
        texts = (
            f"{wait.figures[key]['median_s'] * 1e6:.0f} us" if key in wait.figures else "" for key in keys
        )
        table.add_row(wait.transport, *texts)
    return table


def _record(
    found: list[transport_bench.Result], waits: list[transport_bench.Latency]
) -> dict[str, dict[str, object]]:
    sizes = {f"{r.transport} {size_text(r.span_bytes, r.num_spans)}": r for r in found}
    return {
        "throughput": {
            name: {
                **result.figures,
                "bytes_per_s": result.bytes_per_s,
                "of_memcpy": result.ratio("memcpy"),
                "of_bare": result.ratio("bare"),
            }
            for name, result in sizes.items()
        },
        "latency": {wait.transport: wait.figures for wait in waits},
    }
