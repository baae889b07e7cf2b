"""`baton bench transport`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.bench import transport as transport_bench
from baton.bench.plot import plot_throughput
from baton.bench.record import write
from baton.bench.sizes import parse_sizes, size_text
from baton.cli.bench.options import Out, Repeats, check_names, progress_bar, result_path

SIZES = "4KiBx256,64KiBx256,1MiBx64"


def transport(
    transports: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="comma-separated, NAME or NAME:OPTION=VALUE; default: all"),
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="spans as SIZExCOUNT, comma-separated")] = SIZES,
    repeats: Repeats = 15,
    out: Out = None,
) -> None:
    """Measures throughput and latency against memcpy and each transport's own library called bare."""
    wanted, names = parse_sizes(sizes), check_names(transports)
    found: list[transport_bench.Result] = []
    waits: list[transport_bench.Latency] = []
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(names) * (1 + len(wanted)))
        for result in transport_bench.run(names, wanted, repeats):
            (found if isinstance(result, transport_bench.Result) else waits).append(result)  # type: ignore[arg-type]
            progress.update(task, advance=1, description=result.transport)
    Console().print(_throughput_table(found))
    Console().print(_latency_table(waits))
    path = result_path("transport", out)
    write(path, _record(found, waits))
    print(f"written to {path}")
    picture = path.with_suffix(".png")
    if plot_throughput(found, picture):
        print(f"drawn in {picture}")
    else:
        print("no picture: matplotlib is not installed (pip install 'baton[plot]')")


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
