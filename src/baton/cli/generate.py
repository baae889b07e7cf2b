"""`baton generate`: answers a prompt with a model in one or two layouts on this machine.

The answer goes to stdout as it comes, everything else to stderr.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from baton.cli.options import (
    DECODE_ARGS,
    DRAFT,
    FIRST_TOKEN,
    LAYOUT_REMEDIES,
    MODEL,
    PREFILL_ARGS,
    EngineOptions,
    Side,
)
from baton.cli.parser import argument, command, engine_fields, flag, option, override
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.engine.deployment import Deployment, PairRequest, PairResponse


@partial(command, remedies=LAYOUT_REMEDIES)
def generate(
    prompt: str = argument("PROMPT"),
    *,
    model: str = MODEL,
    prefill: str = option("tp1", "LAYOUT", "layout of the prefill instance, like pp2.tp2"),
    decode: str | None = option(
        None, "LAYOUT", "layout of the decode instance (default: no second instance)"
    ),
    prefill_args: str | None = PREFILL_ARGS,
    decode_args: str | None = DECODE_ARGS,
    max_tokens: int = option(256, "N", "maximum tokens to generate"),
    temperature: float = option(0.0, "T", "sampling temperature; 0: greedy decoding"),
    top_p: float = option(1.0, "P", "top-p (nucleus) sampling"),
    top_k: int = option(0, "K", "top-k sampling; 0: all tokens"),
    seed: int = option(0, "N", "sampling seed"),
    raw: bool = flag("do not apply the chat template"),
    first_token: Side = FIRST_TOKEN,
    no_pipeline: bool = flag("hand the KV cache over only after the last layer"),
    draft: int = DRAFT,
    engine: EngineOptions,
    timeline: tuple[Path, ...] = option(
        (), "FILE", "write the request's timeline: FILE.png or FILE.json (Perfetto)"
    ),
) -> None:
    """Answer a prompt; with --decode, prefill it in one layout and decode it in another.

    PROMPT is text, or token ids if the model has no tokenizer.
    """
    # Importing torch takes seconds, which --help and mistakes do without.
    from baton.cli.checks import check_first, check_same_transport, check_transport, side_options

    layouts = [prefill] if decode is None else [prefill, decode]
    check_first(model, layouts, engine.dtype)
    check_transport(engine.transport)
    from baton.engine.config import EngineConfig, check_config
    from baton.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    if decode is None and decode_args is not None:
        raise ConfigError("--decode-args is for the decode instance; give --decode too")
    sides = [override(engine, side_options("--prefill-args", prefill_args))]
    if decode is not None:
        own = side_options("--decode-args", decode_args)
        sides.append(override(engine, {"link": None, **own}))  # the link is of ranks that send
    configs = [
        EngineConfig(model=model, layout=layout, draft_tokens=draft, **engine_fields(side))
        for layout, side in zip((prefill, decode), sides, strict=False)
        if layout is not None
    ]
    check_same_transport(config.transport for config in configs)
    for config in configs:
        check_config(config)
    from rich.console import Console

    from baton.cli.output import check_timeline, figures_text, size_lines, start_engine, write_timelines

    for path in timeline:
        check_timeline(path)
    if timeline and decode is None:
        raise ConfigError("--timeline shows a hand-over; give --decode too")
    from baton.engine.deployment import Deployment, PairRequest
    from baton.engine.requests import EngineRequest
    from baton.plan.printer import human_time

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    deployment = Deployment(*configs)
    request = EngineRequest(deployment.prompt(prompt, is_raw=raw), params)
    ask = PairRequest(request, is_pipelined=not no_pipeline, first_token=first_token)
    deployment.check(request)
    for line in size_lines(deployment):
        console.print(line, style="dim", markup=False)
    with start_engine(deployment):
        answer, num_tokens, last_s = _stream(deployment, ask)
        trace = answer.handoff()
        ttft = f"ttft {human_time(answer.first_s - answer.asked_s)}"
        timings = ttft if trace is None else figures_text(trace.figures())
        timings += f"; {len(request.tokens)} tokens in, {num_tokens} out"
        if num_tokens > 1:
            timings += f", {human_time((last_s - answer.first_s) / (num_tokens - 1))} each after the first"
        console.print(timings, style="dim", markup=False)
    for path in timeline:
        if trace is None:
            console.print(f"no {path}: the answer ended with its first token and nothing was handed over")
            continue
        title = f"{model}: {prefill} to {decode}"
        console.print(write_timelines([trace.timeline("request")], path, title), markup=False)


def _stream(deployment: Deployment, ask: PairRequest) -> tuple[PairResponse, int, float]:
    """Prints the answer as it comes, as text or else as token ids; also returns its length and last time."""
    answer, pieces = deployment.ask(ask)
    num_tokens, last_s = 0, 0.0
    for piece in pieces:
        num_tokens, last_s = num_tokens + len(piece.tokens), monotonic()
        if deployment.tokenizer is None:
            print(*(sampled.token for sampled in piece.tokens), end=" ", flush=True)
        else:
            print(piece.text, end="", flush=True)
    print(flush=True)
    return answer, num_tokens, last_s
