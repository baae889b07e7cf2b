"""Carries `baton generate` out: the answer on stdout as it comes, everything else on stderr."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from rich.console import Console

from baton.bench.handoff.scene import parse_speed
from baton.cli.engine.showing import check_timeline, figures_text, size_lines, start, write_timelines
from baton.cli.generate import Question, Setting
from baton.engine.config import EngineConfig
from baton.engine.deployment import Deployment, PairRequest, PairResponse
from baton.engine.requests import EngineRequest
from baton.errors import ConfigError
from baton.plan.printer import human_time

__all__ = ["parse_speed", "run"]


def run(setting: Setting, question: Question) -> None:
    """Starts the instances, streams the answer, says what it took."""
    for path in question.timelines:
        check_timeline(path)
    if question.timelines and setting.decode is None:
        raise ConfigError("--timeline shows a hand-over; give --decode too")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    deployment = Deployment(*configs(setting))
    ask = PairRequest(
        EngineRequest(deployment.prompt(question.prompt, is_raw=question.is_raw), question.params),
        is_pipelined=question.is_pipelined,
        first_token=question.first_token,
    )
    deployment.check(ask.request)
    for line in size_lines(deployment):
        console.print(line, style="dim", markup=False)
    with start(deployment):
        answer, tokens_text = stream(deployment, ask)
        console.print(f"{_times(answer)}; {tokens_text}", style="dim", markup=False)
    found = answer.handoff()
    for path in question.timelines:
        if found is None:
            console.print(f"no {path}: the answer ended with its first token and nothing was handed over")
            continue
        title = f"{setting.model}: {setting.prefill} to {setting.decode}"
        console.print(write_timelines([found.timeline("request")], path, title), markup=False)


def configs(setting: Setting) -> list[EngineConfig]:
    """The prefill instance, and the decode instance if there is to be one."""
    prefill = EngineConfig(
        model=setting.model,
        layout=setting.prefill,
        dtype=setting.dtype,
        device=setting.device,
        transport=setting.transport,
        link_bytes_per_s=setting.link_bytes_per_s,
        policy=setting.policy,
        has_draft=setting.has_draft,
    )
    if setting.decode is None:
        return [prefill]
    return [prefill, replace(prefill, layout=setting.decode, link_bytes_per_s=0.0)]


def stream(deployment: Deployment, ask: PairRequest) -> tuple[PairResponse, str]:
    """Prints the answer as it comes, its text or else its token ids, and says how many tokens it had."""
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
    pace_s = (last_s - answer.first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
    return answer, f"{counts}, {human_time(pace_s)} each after the first" if pace_s else counts


def _times(answer: PairResponse) -> str:
    found = answer.handoff()
    if found is not None:
        return figures_text(found.figures())
    return f"ttft {human_time(answer.first_s - answer.asked_s)}"
