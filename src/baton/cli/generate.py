"""`baton generate`: a prompt, answered by a model in one or two layouts on this machine."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Setting:
    """What is started."""

    model: str
    prefill: str
    decode: str | None = None
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    policy: str = "cost"
    dtype: str = "fp32"
    device: str = "cpu"
    has_draft: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What it is asked."""

    prompt: str
    params: SamplingParams
    is_raw: bool = False
    is_pipelined: bool = True
    first_token: str = "prefill"
    timelines: tuple[Path, ...] = ()


def generate(
    prompt: Annotated[str, typer.Argument(help="the prompt; token ids where the model has no tokenizer")],
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="a folder, a .gguf file, demo, or dummy:CARD")
    ],
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="layout that prefills, as pp2.tp2")] = "tp1",
    decode: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="layout that decodes; default: no second instance")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="NAME", help="NAME or NAME:OPTION=VALUE")] = "shm",
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="of each prefill rank, like 50MB/s; default: none")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="of the answer")] = 256,
    temperature: Annotated[float, typer.Option(metavar="T", help="0: the likeliest token, always")] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="likeliest tokens of this much in sum")] = 1.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="likeliest tokens; 0: all")] = 0,
    seed: Annotated[int, typer.Option(metavar="S", help="of the sampling")] = 0,
    overlap: Annotated[str, typer.Option(metavar="P", help="cost, adaptive, fixed:N or off")] = "cost",
    first_token: Annotated[
        str, typer.Option(metavar="SIDE", help="prefill: as soon as it is there; decode: once admitted")
    ] = "prefill",
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="hand over after the last layer only")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="D", help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda")] = "cpu",
    draft: Annotated[
        bool, typer.Option("--draft", help="guess a token ahead by the model's own draft layer")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="the prompt as it is, no chat template")] = False,
    timeline: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="write it: FILE.png or FILE.json (Perfetto)")
    ] = None,
) -> None:
    """Answers a prompt; with --decode it is prefilled in one layout and decoded in another."""
    # The engine brings torch along, which other verbs and --help need not wait for.
    heavy = importlib.import_module("baton.cli.engine.generate")
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    speed = heavy.parse_speed(link) if link else 0.0
    heavy.run(
        Setting(model, prefill, decode, transport, speed, overlap, dtype, device, draft),
        Question(prompt, params, raw, not no_pipeline, first_token, tuple(timeline or ())),
    )
