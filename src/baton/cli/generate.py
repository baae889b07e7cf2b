"""`baton generate`: answers a prompt with a model in one or two layouts on this machine.

The answer goes to stdout as it comes, everything else to stderr.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from baton.cli.options import (
    DecodeArgs,
    Device,
    Draft,
    FirstToken,
    Link,
    Model,
    Overlap,
    PrefillArgs,
    Transport,
    Verify,
)
from baton.cli.output import check_timeline, figures_text, size_lines, start_engine, write_timelines
from baton.cli.side_args import check_same_transport, parse_side_args
from baton.engine.sampling_params import SamplingParams
from baton.errors import ConfigError
from baton.plan.printer import human_time
from baton.units import parse_speed

if TYPE_CHECKING:
    from baton.engine.deployment import Deployment, PairRequest, PairResponse


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", hidden=True)],
    *,
    model: Model,
    prefill: Annotated[
        str, typer.Option(metavar="LAYOUT", help="layout of the prefill instance, like pp2.tp2")
    ] = "tp1",
    decode: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="layout of the decode instance (default: no second instance)"),
    ] = None,
    transport: Transport = "shm",
    link: Link = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="maximum tokens to generate")] = 256,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="sampling temperature; 0: greedy decoding")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="top-p (nucleus) sampling")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="top-k sampling; 0: all tokens")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="sampling seed")] = 0,
    overlap: Overlap = "cost",
    first_token: FirstToken = "prefill",
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="hand the KV cache over only after the last layer")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="dtype of weights and KV cache: auto (the checkpoint's), bfloat16, float16 or float32",
        ),
    ] = "auto",
    device: Device = "auto",
    draft: Draft = False,
    prefill_args: PrefillArgs = None,
    decode_args: DecodeArgs = None,
    verify: Verify = False,
    raw: Annotated[bool, typer.Option("--raw", help="do not apply the chat template")] = False,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="write the request's timeline: FILE.png or FILE.json (Perfetto)"),
    ] = None,
) -> None:
    """Answer a prompt; with --decode, prefill it in one layout and decode it in another.

    PROMPT is text, or token ids if the model has no tokenizer.
    """
    # Importing torch takes seconds, which --help does without.
    from baton.engine.config import EngineConfig
    from baton.engine.deployment import Deployment, PairRequest
    from baton.engine.requests import EngineRequest

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    configs = [
        EngineConfig(
            model=model,
            layout=prefill,
            dtype=dtype,
            device=device,
            transport=transport,
            link_bytes_per_s=parse_speed(link) if link else 0.0,
            policy=overlap,
            is_verified=verify,
            has_draft=draft,
        )
    ]
    if decode is not None:
        configs.append(replace(configs[0], layout=decode, link_bytes_per_s=0.0))
    elif decode_args is not None:
        raise ConfigError("--decode-args is for the decode instance; give --decode too")
    sides = (("--prefill-args", prefill_args), ("--decode-args", decode_args))
    configs = [
        replace(config, **parse_side_args(*side).engine_options)
        for config, side in zip(configs, sides, strict=False)
    ]
    check_same_transport(config.transport for config in configs)
    timelines = timeline or []
    for path in timelines:
        check_timeline(path)
    if timelines and decode is None:
        raise ConfigError("--timeline shows a hand-over; give --decode too")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    deployment = Deployment(*configs)
    request = EngineRequest(deployment.prompt(prompt, is_raw=raw), params)
    ask = PairRequest(request, is_pipelined=not no_pipeline, first_token=first_token)
    deployment.check(request)
    for line in size_lines(deployment):
        console.print(line, style="dim", markup=False)
    with start_engine(deployment):
        answer, token_counts = _stream(deployment, ask)
        trace = answer.handoff()
        ttft = f"ttft {human_time(answer.first_s - answer.asked_s)}"
        timings = ttft if trace is None else figures_text(trace.figures())
        console.print(f"{timings}; {token_counts}", style="dim", markup=False)
    for path in timelines:
        if trace is None:
            console.print(f"no {path}: the answer ended with its first token and nothing was handed over")
            continue
        title = f"{model}: {prefill} to {decode}"
        console.print(write_timelines([trace.timeline("request")], path, title), markup=False)


def _stream(deployment: Deployment, ask: PairRequest) -> tuple[PairResponse, str]:
    """Prints the answer as it comes, as text or else as token ids; also returns its token counts."""
    answer, pieces = deployment.ask(ask)
    num_tokens, last_s = 0, 0.0
    for piece in pieces:
        num_tokens, last_s = num_tokens + len(piece.tokens), monotonic()
        if deployment.tokenizer is None:
            print(*(sampled.token for sampled in piece.tokens), end=" ", flush=True)
        else:
            print(piece.text, end="", flush=True)
    print(flush=True)
    counts = f"{len(ask.request.tokens)} tokens in, {num_tokens} out"
    tpot_s = (last_s - answer.first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
    return answer, f"{counts}, {human_time(tpot_s)} each after the first" if tpot_s else counts
