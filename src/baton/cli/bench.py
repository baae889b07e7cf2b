"""`baton bench`: measurements, each written with its command, machine and commit."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baton import settings
from baton.cli.options import (
    CLIENT_KEY_FILE,
    DEVICE,
    ENDPOINT_PROCESS,
    LINK,
    MODEL,
    OVERLAP,
    TRANSPORT,
    DeploymentOptions,
)
from baton.cli.parser import command, flag, like, option, parse, words
from baton.errors import ConfigError
from baton.units import parse_speed

if TYPE_CHECKING:
    from baton.cli.deployment import DeploymentProcesses

LOOPBACK_URL = "http://127.0.0.1"
RESULTS = Path("benchmarks/results")

DTYPE = option("fp32", "DTYPE", "dtype of weights and KV cache: fp32, bf16 or fp16")
JSON = option(None, "FILE", "JSON file for the results (default: in benchmarks/results)")
PAGE = option(16, "N", "KV cache page size in tokens, on both sides", min=1)
PNG = option(None, "FILE", "PNG file for a plot (needs matplotlib)")
REPEAT = option(5, "N", "measured rounds", min=1, max=1000)
CHUNK = option(0, "N", "prefill chunk in tokens; 0: the whole prompt", min=0)


@contextmanager
def _progress() -> Iterator[Callable[[int | None, int | None, str], None]]:
    """A progress bar on stderr; call it with total and completed steps (None: one more) and a text."""
    from rich.console import Console
    from rich.progress import Progress

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
    # It takes longer to import than a mistake may take.
    from baton.transport import check_library, parse_transport, transport_names

    bare = {name: parse_transport(name)[0] for name in text.split(",")} if text is not None else {}
    for name in bare.values():
        check_library(name)
    from baton.cli.doctor_checks import check_transport

    if text is None:
        return [name for name in transport_names() if check_transport(name).is_ok]
    for name in bare.values():
        finding = check_transport(name)
        if not finding.is_ok:
            raise ConfigError(str(finding))
    return list(bare)


@command
def plan(
    repeats: int = like(REPEAT, 7, "runs of each measurement"),
    out: Path | None = JSON,
) -> None:
    """Time planning and binding, and count copies."""
    from rich.console import Console
    from rich.table import Table

    from baton.bench import plan as plan_bench
    from baton.bench.record import write

    rows = []
    with _progress() as progress:
        for row in plan_bench.run(repeats):
            rows.append(row)
            progress(None, None, row.name)
    table = Table("measurement", "result", "target", title="baton bench plan")
    for row in rows:
        table.add_row(row.name, row.text, {None: "", True: "met", False: "missed"}[row.is_met])
    Console().print(table)
    write(_result_path("plan", out), {row.name: {**row.figures, "is_met": row.is_met} for row in rows})


@command
def transport(
    transports: str | None = option(
        None, "NAME,...", "transports, each NAME or NAME:OPTION=VALUE (default: all that work)"
    ),
    sizes: str = option(
        "4KiBx256,64KiBx256,1MiBx64", "SIZExCOUNT,...", "batches: size of a span x number of spans"
    ),
    repeats: int = like(REPEAT, 15, "runs of each measurement"),
    out: Path | None = JSON,
) -> None:
    """Measure throughput and latency of transports, beside memcpy and each transport's own library."""
    from rich.console import Console

    from baton.bench import transport as transport_bench
    from baton.bench.record import show_picture, write

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


@command
def handoff(
    *,
    from_: str = option("pp2.tp2", "LAYOUT", "layout of the prefill instance"),
    to: str = option("tp4", "LAYOUT", "layout of the decode instance"),
    model: str = option("llama-3-8b", "MODEL", "model card, as for baton plan"),
    tokens: int = option(8192, "N", "prompt length in tokens", min=1),
    transport: str = TRANSPORT,
    link: str | None = LINK,
    layer_ms: float | None = option(
        None, "MS", "compute time of one layer of the prompt (default: from --ratio)", min=0
    ),
    ratio: float = option(1.0, "R", "compute time over transfer time, without --layer-ms", min=0),
    policy: str = OVERLAP,
    chunk: int = CHUNK,
    page: int = like(PAGE, 64),
    dtype: str = option("bf16", "DTYPE", "KV cache dtype, or SOURCE:TARGET"),
    storage: str = option("hnd", "STORAGE", "KV cache storage as for baton plan, or SOURCE:TARGET"),
    repeat: int = like(REPEAT, 3, "hand-overs; each is compared byte by byte"),
    verify: bool = flag("use end-to-end checksums"),
    control: bool = flag("measure the control time of tiny transfers instead"),
    sweep: bool = flag("measure every policy with compute from short to long instead"),
    out: Path | None = option(None, "DIR", "folder for the results (default: benchmarks/results)"),
) -> int:
    """Hand a KV cache over between real processes at the pace of a prefill, and compare every byte."""
    if control and sweep:
        raise ConfigError("--control and --sweep are two measurements; give one of them")
    _check_transports(transport)
    from baton.bench.handoff import control as control_bench
    from baton.bench.handoff import run as handoff_bench
    from baton.bench.handoff import sweep as sweep_bench
    from baton.bench.handoff.workload import SideSpec, Workload

    dtypes, storages = _both_sides(dtype), _both_sides(storage)
    workload = Workload(
        model,
        SideSpec(from_, page, storages[0], dtypes[0]),
        SideSpec(to, page, storages[1], dtypes[1]),
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
            name, small = "handoff-control", control_bench.small_workload(transport, from_, to)
            report = control_bench.run(small, control_bench.NUM_ALONE, control_bench.NUM_ROUNDS, update)
        elif sweep:
            name, wide = "handoff-sweep", sweep_bench.sweep_workload(transport, from_, to)
            report = handoff_bench.run(
                sweep_bench.SweepResult, wide, sweep_bench.sweep_cases(options), update
            )
        else:
            name = "handoff"
            report = handoff_bench.run(handoff_bench.HandoffResult, workload, [[options]], update)
    handoff_bench.show(report, _result_path(name, None if out is None else out / f"{name}.json"))
    return 0 if report.is_right else 1


def _both_sides(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    return first, second or first


@command
def overlap(
    *,
    model: str = like(MODEL, "demo"),
    prefill: str = option("tp1", "LAYOUT", "layout of the prefill instance"),
    decode: str = option("tp1", "LAYOUT", "layout of the decode instance"),
    tokens: str = option("256,512,1024", "N,...", "prompt lengths in tokens"),
    link: str = option(
        "auto",
        "SPEED,...",
        "link speed of each source rank, like 12.5GB/s; full: no limit; auto: the speed at which transfer "
        "takes as long as compute",
    ),
    policy: str = option(
        "off,fixed:4,adaptive,cost", "POLICY,...", "layer-group policies: off, cost, adaptive, fixed:N"
    ),
    dtype: str = DTYPE,
    device: str = like(DEVICE, "cpu"),
    transport: str = TRANSPORT,
    endpoint_process: bool | None = ENDPOINT_PROCESS,
    chunk: int = CHUNK,
    page: int = PAGE,
    threads: int = option(0, "N", "threads of each rank; 0: derived from the cores", min=0),
    repeat: int = like(REPEAT, 5, "hand-overs of each policy and length"),
    json: Path | None = JSON,
    png: Path | None = PNG,
) -> int:
    """Measure what layer pipelining hides: time to hand-over by policy, against compute alone."""
    from baton.cli.checks import check_first

    check_first(model, [prefill, decode])
    _check_transports(transport)
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
    overlap_bench.check(options)
    with _progress() as progress:
        result = overlap_bench.run(options, lambda text: progress(options.num_steps, None, text))
    overlap_bench.show(result, options, _result_path("overlap", json), png)
    return 0 if result.is_right else 1


@command
def engine(
    *,
    model: str = like(MODEL, "demo"),
    dtype: str = DTYPE,
    device: str = like(DEVICE, "cpu"),
    threads: int = option(0, "N", "threads of both; 0: the machine's cores", min=0),
    tokens: int = option(512, "N", "prompt length in tokens", min=2),
    answer: int = option(64, "N", "tokens generated per request", min=2),
    requests: int = option(8, "N", "requests decoded at once", min=1),
    repeat: int = REPEAT,
    json: Path | None = JSON,
    png: Path | None = PNG,
) -> None:
    """Measure prefill and decode against transformers on the same checkpoint."""
    from baton.cli.checks import check_first

    check_first(model, [])
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


@command
def serve(
    *,
    url: str | None = option(None, "URL", "any OpenAI endpoint (default: start one as baton up does)"),
    api_key_file: Path | None = CLIENT_KEY_FILE,
    model: str | None = option(None, "MODEL", "model name at the endpoint, or the model to deploy"),
    endpoint: str = option("completions", "KIND", "completions or chat"),
    prefill: str = option("tp1", "LAYOUT,...", "prefill instances to deploy, one layout each"),
    decode: str = option("tp1", "LAYOUT,...", "decode instances to deploy; none: no disaggregation"),
    link: str | None = LINK,
    rate: str = option("inf", "R", "requests per second (Poisson arrivals), or inf"),
    concurrency: int = option(0, "N", "maximum requests in flight; 0: no limit", min=0),
    requests: int = option(32, "N", "number of measured requests", min=1),
    input_tokens: str = option("256", "N", "prompt length in tokens, or LOW:HIGH"),
    output_tokens: str = option("32", "N", "answer length in tokens, or LOW:HIGH"),
    shared_prefix: int = option(0, "N", "length of a prefix that all prompts share", min=0),
    prompts: str = option("auto", "FORM", "form of the prompts: auto, tokens, text"),
    seed: int = option(0, "N", "seed of prompts, lengths and arrivals"),
    warmup: int = option(2, "N", "warm-up requests, not measured", min=0),
    slo: str | None = option(None, "LIMITS", "limits for goodput, like ttft=500ms,itl=50ms"),
    ignore_eos: bool = option(True, None, "generate answers of full length"),
    timeout: float = option(600.0, "S", "seconds per request", min=1),
    json: Path | None = JSON,
    png: Path | None = PNG,
) -> int:
    """Send load to an OpenAI endpoint and measure what clients see."""
    if url is None:
        from baton.cli.checks import check_first

        check_first(model or "demo", [*prefill.split(","), *(decode.split(",") if decode != "none" else ())])
    from baton.bench.serve import load as serve_bench
    from baton.bench.serve import report as serve_report
    from baton.bench.serve.client import OpenAIEndpoint, parse_slo

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
    serve_bench.check_prompts(prompts, endpoint)
    keys = settings.api_keys(api_key_file)
    key = keys[0] if keys else ""
    target = OpenAIEndpoint(url or LOOPBACK_URL, model or "", endpoint, key, ignore_eos, timeout)
    with ExitStack() as stack:
        if url is None:
            line = ["--model", model or "demo", "--prefill", prefill, "--port", "0"]
            line += words(decode=None if decode == "none" else decode, link=link, api_key_file=api_key_file)
            deployment = _start_deployment(line, stack)
            target = replace(target, url=deployment.url, model="")
        with _progress() as progress:
            result = asyncio.run(serve_bench.measure(target, load, prompts, progress))
    summary = serve_report.summarise(result.timings, limits)
    serve_report.show(result, summary, load, limits, path=_result_path("serve", json), picture=png)
    return 0 if summary.num_ok else 1


def _start_deployment(line: list[str], stack: ExitStack) -> DeploymentProcesses:
    """A deployment of these options of `baton up`; its processes end with the stack."""
    # It imports the engine, which other benchmarks do without.
    from baton.cli.deployment import DeploymentProcesses, fork_early, plan_instances, plan_pairs

    options = parse(DeploymentOptions, line)
    fork_early(options.instance.model)
    plan_pairs(plan_instances(options))  # raises on what cannot work
    deployment = stack.enter_context(DeploymentProcesses(options, shows_logs=False))
    deployment.start()
    return deployment


bench = click.Group(
    "bench", [plan, transport, handoff, overlap, engine, serve], help="Measure Baton.", no_args_is_help=False
)
