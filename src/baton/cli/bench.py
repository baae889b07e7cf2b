"""`baton bench`: measurements, each written with its command, machine and commit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton import settings
from baton.bench import plan as plan_bench
from baton.bench import transport as transport_bench
from baton.bench.handoff import control as control_bench
from baton.bench.handoff import run as handoff_bench
from baton.bench.handoff import sweep as sweep_bench
from baton.bench.handoff.workload import SideSpec, Workload
from baton.bench.record import show_picture, write
from baton.bench.serve import load as serve_bench
from baton.bench.serve import report as serve_report
from baton.bench.serve.client import ENDPOINTS, OpenAIEndpoint, parse_slo
from baton.bench.serve.load import DeploymentShape
from baton.cli.doctor import check_transport
from baton.cli.options import Device, EndpointProcess, Model, Overlap, Transport
from baton.errors import ConfigError
from baton.transport import parse_transport, transport_names
from baton.units import parse_speed

RESULTS = Path("benchmarks/results")
SIZES = "4KiBx256,64KiBx256,1MiBx64"

Dtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="dtype of weights and KV cache: fp32, bf16 or fp16")
]
Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file for the results (default: in benchmarks/results)"),
]
Page = Annotated[int, typer.Option(min=1, metavar="N", help="KV cache page size in tokens, on both sides")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="PNG file for a plot (needs matplotlib)")]
Repeats = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="runs of each measurement")]
Chunk = Annotated[int, typer.Option(min=0, metavar="N", help="prefill chunk in tokens; 0: the whole prompt")]

bench = typer.Typer(help="Measure Baton.")


@contextmanager
def _progress() -> Iterator[Callable[[int | None, int | None, str], None]]:
    """A progress bar on stderr; call it with total and completed steps (None: one more) and a text."""
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)

        def update(total: int | None, done: int | None, text: str) -> None:
            advance = 1 if done is None else None
            bar.update(task, total=total, completed=done, advance=advance, description=text)

        yield update


def _result_path(name: str, path: Path | None) -> Path:
    return path or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"


def _check_transports(text: str | None) -> list[str]:
    """The transports of a comma-separated list, default all that work here; raises if one does not work."""
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


@bench.command()
def plan(repeats: Repeats = 7, out: Json = None) -> None:
    """Time planning and binding, and count copies."""
    rows = []
    with _progress() as progress:
        for row in plan_bench.run(repeats):
            rows.append(row)
            progress(None, None, row.name)
    table = Table("measurement", "result", "target", title="baton bench plan")
    for row in rows:
        table.add_row(row.name, row.text, {None: "", True: "met", False: "missed"}[row.is_met])
    Console().print(table)
    path = _result_path("plan", out)
    write(path, {row.name: {**row.figures, "is_met": row.is_met} for row in rows})


@bench.command()
def transport(
    transports: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="transports, each NAME or NAME:OPTION=VALUE (default: all that work)"
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZExCOUNT,...", help="batches: size of a span x number of spans")
    ] = SIZES,
    repeats: Repeats = 15,
    out: Json = None,
) -> None:
    """Measure throughput and latency of transports, beside memcpy and each transport's own library."""
    batches, names = transport_bench.parse_sizes(sizes), _check_transports(transports)
    throughputs: list[transport_bench.Throughput] = []
    latencies: list[transport_bench.Latency] = []
    with _progress() as progress:
        for result in transport_bench.run(names, batches, repeats):
            if isinstance(result, transport_bench.Throughput):
                throughputs.append(result)
            else:
                latencies.append(result)
            progress(len(names) * (1 + len(batches)), None, result.transport)
    Console().print(transport_bench.throughput_table(throughputs))
    Console().print(transport_bench.latency_table(latencies))
    path = _result_path("transport", out)
    write(path, transport_bench.record(throughputs, latencies))
    show_picture(path.with_suffix(".png"), lambda pyplot: transport_bench.paint(pyplot, throughputs), dpi=150)


@bench.command()
def handoff(
    *,
    source: Annotated[
        str, typer.Option("--from", metavar="LAYOUT", help="layout of the prefill instance")
    ] = "pp2.tp2",
    target: Annotated[
        str, typer.Option("--to", metavar="LAYOUT", help="layout of the decode instance")
    ] = "tp4",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="model card, as for baton plan")
    ] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="prompt length in tokens")] = 8192,
    transport: Transport = "shm",
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED", help="throttle each source rank's link, like 12.5GB/s (default: no limit)"
        ),
    ] = None,
    layer_ms: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="MS", help="compute time of one layer of the prompt (default: from --ratio)"
        ),
    ] = None,
    ratio: Annotated[
        float, typer.Option(min=0, metavar="R", help="compute time over transfer time, without --layer-ms")
    ] = 1.0,
    policy: Overlap = "cost",
    chunk: Chunk = 0,
    page: Page = 64,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="KV cache dtype, or SOURCE:TARGET")] = "bf16",
    storage: Annotated[
        str, typer.Option(metavar="STORAGE", help="KV cache storage as for baton plan, or SOURCE:TARGET")
    ] = "hnd",
    repeat: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="hand-overs; each is compared byte by byte")
    ] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="use end-to-end checksums")] = False,
    control: Annotated[
        bool, typer.Option("--control", help="measure the control time of tiny transfers instead")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="measure every policy from little compute to much instead")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for the results (default: benchmarks/results)"),
    ] = None,
) -> None:
    """Hand a KV cache over between real processes at the pace of a prefill, and compare every byte."""
    if control and sweep:
        raise ConfigError("--control and --sweep are two measurements; give one of them")
    _check_transports(transport)
    dtypes, storages = _both_sides(dtype), _both_sides(storage)
    workload = Workload(
        model,
        SideSpec(source, page, storages[0], dtypes[0]),
        SideSpec(target, page, storages[1], dtypes[1]),
        tokens,
        transport=transport,
        link_bytes_per_s=parse_speed(link) if link else 0.0,
    )
    layer_s = None if layer_ms is None else layer_ms / 1e3
    options = handoff_bench.HandoffOptions(policy, layer_s, ratio, chunk, repeat, verify)
    handoff_bench.check(workload, options)
    report: handoff_bench.HandoffReport
    with _progress() as progress:
        update = partial(progress, None, None)
        if control:
            name, small = "handoff-control", control_bench.small_workload(transport, source, target)
            report = control_bench.run(small, control_bench.NUM_ALONE, control_bench.NUM_ROUNDS, update)
        elif sweep:
            name, wide = "handoff-sweep", sweep_bench.sweep_workload(transport, source, target)
            report = sweep_bench.run(wide, options, sweep_bench.RATIOS, update)
        else:
            name, report = "handoff", handoff_bench.run(workload, options, update)
    handoff_bench.show(report, _result_path(name, None if out is None else out / f"{name}.json"))
    if not report.is_right:
        raise typer.Exit(1)


def _both_sides(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    return first, second or first


@bench.command()
def overlap(
    *,
    model: Model = "demo",
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="layout of the prefill instance")] = "tp1",
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="layout of the decode instance")] = "tp1",
    tokens: Annotated[str, typer.Option(metavar="N,...", help="prompt lengths in tokens")] = "256,512,1024",
    link: Annotated[
        str,
        typer.Option(
            metavar="SPEED,...",
            help="link speed of each source rank, like 12.5GB/s; full: no limit; "
            "auto: the speed at which transfer takes as long as compute",
        ),
    ] = "auto",
    policy: Annotated[
        str, typer.Option(metavar="POLICY,...", help="layer-group policies: off, cost, adaptive, fixed:N")
    ] = "off,fixed:4,adaptive,cost",
    dtype: Dtype = "fp32",
    device: Device = "cpu",
    transport: Transport = "shm",
    endpoint_process: EndpointProcess = None,
    chunk: Chunk = 0,
    page: Page = 16,
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", help="threads of each rank; 0: derived from the cores")
    ] = 0,
    repeat: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="hand-overs of each policy and length")
    ] = 5,
    json: Json = None,
    png: Png = None,
) -> None:
    """Measure what layer pipelining hides: time to hand-over by policy, against compute alone."""
    # Importing torch takes seconds, which --help and other benchmarks do without.
    from baton.bench import overlap as overlap_bench

    options = overlap_bench.OverlapOptions(
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=overlap_bench.parse_lengths(tokens),
        links=tuple(link.split(",")),
        policies=tuple(re.split(r",(?!\w+=)", policy)),  # settings of a policy follow it
        dtype=dtype,
        device=device,
        repeats=repeat,
        chunk_tokens=chunk,
        page_tokens=page,
        num_threads=threads,
        transport=transport,
        has_endpoint_process=endpoint_process,
    )
    _check_transports(transport)
    overlap_bench.check(options)
    with _progress() as progress:
        result = overlap_bench.run(options, lambda text: progress(options.num_steps, None, text))
    overlap_bench.show(result, options, _result_path("overlap", json), png)
    if not result.is_right:
        raise typer.Exit(1)


@bench.command()
def engine(
    *,
    model: Model = "demo",
    dtype: Dtype = "fp32",
    device: Device = "cpu",
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", help="threads of both; 0: the machine's cores")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="prompt length in tokens")] = 512,
    answer: Annotated[int, typer.Option(min=2, metavar="N", help="tokens generated per request")] = 64,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="requests decoded at once")] = 8,
    repeat: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="measured rounds")] = 5,
    json: Json = None,
    png: Png = None,
) -> None:
    """Measure prefill and decode against transformers on the same checkpoint."""
    # Importing torch takes seconds, which --help and other benchmarks do without.
    from baton.bench import engine as engine_bench

    options = engine_bench.EngineBenchOptions(
        model=model,
        dtype=dtype,
        device=device,
        num_threads=threads or os.cpu_count() or 1,
        num_prompt=tokens,
        num_decoded=answer,
        num_requests=requests,
        repeats=repeat,
    )
    engine_bench.check(options)
    with _progress() as progress:
        result = engine_bench.run(options, lambda text: progress(options.num_steps, None, text))
    engine_bench.show(result, options, _result_path("engine", json), png)


@bench.command()
def serve(
    *,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="any OpenAI endpoint (default: start a deployment)"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="file whose first line is the API key (default: BATON_API_KEY)"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="model name at the endpoint, or the model to deploy"),
    ] = None,
    endpoint: Annotated[str, typer.Option(metavar="KIND", help=" or ".join(ENDPOINTS))] = "completions",
    prefill: Annotated[
        str, typer.Option(metavar="LAYOUT,...", help="prefill instances to deploy, one layout each")
    ] = "tp1",
    decode: Annotated[
        str,
        typer.Option(metavar="LAYOUT,...", help="decode instances to deploy; none: no disaggregation"),
    ] = "tp1",
    link: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="throttle each prefill rank's link of the deployment"),
    ] = None,
    rate: Annotated[
        str, typer.Option(metavar="R", help="requests per second (Poisson arrivals), or inf")
    ] = "inf",
    concurrency: Annotated[
        int, typer.Option(min=0, metavar="N", help="maximum requests in flight; 0: no limit")
    ] = 0,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="number of measured requests")] = 32,
    input_tokens: Annotated[
        str, typer.Option(metavar="N", help="prompt length in tokens, or LOW:HIGH")
    ] = "256",
    output_tokens: Annotated[
        str, typer.Option(metavar="N", help="answer length in tokens, or LOW:HIGH")
    ] = "32",
    shared_prefix: Annotated[
        int, typer.Option(min=0, metavar="N", help="length of a prefix that all prompts share")
    ] = 0,
    prompts: Annotated[
        str,
        typer.Option(metavar="FORM", help=f"form of the prompts: {', '.join(serve_bench.PROMPTS)}"),
    ] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="seed of prompts, lengths and arrivals")] = 0,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="warm-up requests, not measured")] = 2,
    slo: Annotated[
        str | None,
        typer.Option(metavar="LIMITS", help="limits for goodput, like ttft=500ms,itl=50ms"),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="generate answers of full length")] = True,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="seconds per request")] = 600.0,
    json: Json = None,
    png: Png = None,
) -> None:
    """Send load to an OpenAI endpoint and measure what clients see."""
    limits = parse_slo(slo) if slo is not None else None
    load = serve_bench.LoadSpec(
        num_requests=requests,
        input_tokens=serve_bench.parse_lengths(input_tokens),
        output_tokens=serve_bench.parse_lengths(output_tokens),
        rate=serve_bench.parse_rate(rate),
        concurrency=concurrency,
        num_shared=shared_prefix,
        seed=seed,
        num_warmup=warmup,
    )
    target = None
    if url is not None:
        keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
        target = OpenAIEndpoint(url, model or "", endpoint, keys[0] if keys else "", ignore_eos, timeout)
    shape = DeploymentShape(
        model=model or "demo",
        prefill=tuple(prefill.split(",")),
        decode=() if decode == "none" else tuple(decode.split(",")),
        prefill_options=("--link", link) if link else (),
    )
    options = serve_bench.ServeBenchOptions(load, target, shape, endpoint, prompts)
    with _progress() as progress:
        result = serve_bench.measure(options, progress)
    summary = serve_report.summarise(result.timings, limits)
    serve_report.show(result, summary, load, limits, path=_result_path("serve", json), picture=png)
    if not summary.num_ok:
        raise typer.Exit(1)
