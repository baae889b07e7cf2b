"""`baton bench serve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from baton import settings
from baton.bench.serve.deployment import Shape
from baton.bench.serve.endpoint import ENDPOINTS, Endpoint
from baton.bench.serve.options import Load, parse_lengths, parse_rate, parse_slo
from baton.bench.serve.run import PROMPTS, Wish, measure
from baton.bench.serve.shown import show
from baton.bench.serve.suites import SUITES, SuiteOptions, find_suite
from baton.bench.serve.summary import summarise
from baton.cli.bench.options import Json, Png, progress_bar, result_path
from baton.errors import ConfigError

Count = Annotated[int, typer.Option(min=1, metavar="N", help="requests that are measured")]
Url = Annotated[str | None, typer.Option(metavar="URL", help="of any OpenAI endpoint; default: its own")]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="its first line is shown to the endpoint")]
Served = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="name at the endpoint, or what is deployed: demo, a checkpoint"),
]
Kind = Annotated[str, typer.Option(metavar="KIND", help=" or ".join(ENDPOINTS))]
Sources = Annotated[str, typer.Option(metavar="LAYOUT,...", help="of the own deployment")]
Targets = Annotated[str, typer.Option(metavar="LAYOUT,...", help="the same; none: undisaggregated")]
Link = Annotated[str | None, typer.Option(metavar="SPEED", help="of each source rank of the own deployment")]
Rate = Annotated[str, typer.Option(metavar="R", help="Poisson arrivals a second, or inf")]
Bound = Annotated[int, typer.Option(min=0, metavar="C", help="requests in flight at most; 0: no bound")]
Prompted = Annotated[str, typer.Option(metavar="N", help="of a prompt, or LOW:HIGH")]
Answered = Annotated[str, typer.Option(metavar="N", help="of an answer, or LOW:HIGH")]
Shared = Annotated[int, typer.Option(min=0, metavar="N", help="tokens with which all prompts begin")]
Form = Annotated[str, typer.Option(metavar="FORM", help=", ".join(PROMPTS))]
Seed = Annotated[int, typer.Option(metavar="N", help="of prompts, lengths and arrivals")]
Warmup = Annotated[int, typer.Option(min=0, metavar="N", help="requests before, not measured")]
Bounds = Annotated[str | None, typer.Option(metavar="BOUNDS", help="for goodput, like ttft=500ms,itl=50ms")]
IgnoreEos = Annotated[bool, typer.Option(help="answers of full length")]
Timeout = Annotated[float, typer.Option(min=1, metavar="S", help="of a request, in seconds")]
Named = Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(SUITES)}: instead of one run")]
Rounds = Annotated[int, typer.Option(min=0, max=1000, help="rounds of a suite; 0: its own")]


def serve(
    *,
    url: Url = None,
    api_key_file: KeyFile = None,
    model: Served = None,
    endpoint: Kind = "completions",
    prefill: Sources = "tp1",
    decode: Targets = "tp1",
    link: Link = None,
    rate: Rate = "inf",
    concurrency: Bound = 0,
    requests: Count = 32,
    input_tokens: Prompted = "256",
    output_tokens: Answered = "32",
    shared_prefix: Shared = 0,
    prompts: Form = "auto",
    seed: Seed = 0,
    warmup: Warmup = 2,
    slo: Bounds = None,
    ignore_eos: IgnoreEos = True,
    timeout: Timeout = 600.0,
    suite: Named = None,
    repeat: Rounds = 0,
    json: Json = None,
    png: Png = None,
) -> None:
    """Sends requests to an OpenAI endpoint and measures what a client sees of the answers."""
    if suite is not None:
        if url is not None:
            raise ConfigError("a suite starts its own processes; leave out --url or --suite")
        _run_suite(suite, SuiteOptions(model or "", link or "", repeat, seed), (json, png))
        return
    bounds = parse_slo(slo) if slo is not None else None
    lengths = parse_lengths(input_tokens), parse_lengths(output_tokens)
    load = Load(requests, *lengths, parse_rate(rate), concurrency, shared_prefix, seed, warmup)
    where = None
    if url is not None:
        keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
        where = Endpoint(url, model or "", endpoint, keys[0] if keys else "", ignore_eos, timeout)
    words = ("--link", link) if link else ()
    targets = () if decode == "none" else tuple(decode.split(","))
    shape = Shape(model or "demo", tuple(prefill.split(",")), targets, source_words=words)
    wish = Wish(load, where, shape, endpoint, prompts)
    with progress_bar() as bar:
        run = measure(wish, _telling(bar))
    summary = summarise(run.traces, bounds)
    show(run, summary, (load, bounds), (result_path("serve", json), png))
    if not summary.num_ok:
        raise typer.Exit(1)


def _run_suite(name: str, options: SuiteOptions, files: tuple[Path | None, Path | None]) -> None:
    suite = find_suite(name)
    with progress_bar() as bar:
        found = suite.measure(options, _telling(bar))
    suite.show(found, result_path(f"serve-{name}", files[0]), files[1])
    if not suite.is_right(found):
        raise typer.Exit(1)


def _telling(bar: Progress) -> Callable[[int | None, int, str], None]:
    task = bar.add_task("starting", total=None)

    def tell(total: int | None, done: int, text: str) -> None:
        bar.update(task, total=total, completed=done, description=text)

    return tell
