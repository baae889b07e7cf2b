"""What `baton demo` shows: a real model, prefilled in one layout and decoded in another, timed and checked.

A deployment starts as `baton up` starts it, and all questions go over HTTP. First a chat question. Then a
long one at the full speed of the transport, which measures how long a rank takes to compute its layers. The
prefill instance then restarts behind links throttled so that transfer takes as long as prefill, first without
layer pipelining and then with it, and answers the same question. At the end a single instance in one layout
answers everything again, and every token must be identical.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from baton import settings
from baton.checkpoint.names import DEMO
from baton.cli.client import ApiClient
from baton.cli.deployment import DeploymentProcesses, fork_early, plan_instances, plan_pairs
from baton.cli.options import DeploymentOptions
from baton.cli.output import PICTURE, REFRESH_PER_S, TRACE, figures_text, start_engine, write_timelines
from baton.cli.parser import override, parse
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.trace import HandoffTrace, RequestTrace, serial_s
from baton.errors import ConfigError, EngineError
from baton.plan.printer import human_time

if TYPE_CHECKING:
    from baton.engine.deployment import Deployment

CHAT = "Explain in one sentence what a relay race is."
LONG = "What is the prize of the race?"
SHORT, FREE, WARM_UP = "a chat question", "a long question", "measuring the links"
OFF, ON = "layer pipelining off", "layer pipelining on"
REFERENCE = "tp1"
CHUNK_TOKENS = 4096
"""The long prompt is one prefill chunk, so that only layer pipelining can hide the transfer."""
PATIENT = ("--progress-s", "600", "--silence-s", "30")
"""Without layer pipelining nothing leaves before the end of compute: minutes on a busy machine."""
TRACE_S_MAX = 30.0
"""How long to wait for a request's trace: it is complete once both sides have their pages back."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """A text for the endpoint, and its token ids."""

    text: str
    prompt: tuple[int, ...]
    num_tokens_max: int

    def body(self, model: str, name: str) -> dict[str, Any]:
        """The HTTP request; its own cache salt keeps earlier requests from making it faster."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "temperature": 0,
            "max_tokens": self.num_tokens_max,
            "min_tokens": 2,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": name,
        }

    def request(self) -> EngineRequest:
        """The same request for the engine itself."""
        params = SamplingParams(temperature=0.0, max_tokens=self.num_tokens_max, min_tokens=2)
        return EngineRequest(self.prompt, params)


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The deployment's answer to one question."""

    name: str
    question: Question
    tokens: tuple[int, ...]
    trace: HandoffTrace


def demo_model(model: str, prefill: str, decode: str, tokens: int, max_tokens: int, out: Path) -> int:
    """Answers questions with prefill and decode in different layouts, and checks that all tokens are equal.

    Returns the exit code.
    """
    fork_early(model)
    # They import torch, which happens before the fork, not before the import of this module.
    from baton.engine.config import EngineConfig
    from baton.engine.deployment import Deployment

    console = Console(highlight=False, soft_wrap=True)
    reference = Deployment(EngineConfig(_fetch(model), REFERENCE, "reference", chunk_tokens=CHUNK_TOKENS))
    # On the CPU, as the reference, whose tokens are greedy. Short prompts are handed over too.
    given = ["--model", model, "--prefill", prefill, "--decode", decode, "--port", "0", "--device", "cpu"]
    given += ["--generation-config", "none", "--chunk-tokens", str(CHUNK_TOKENS), "--local", "never"]
    options = parse(DeploymentOptions, [*given, *PATIENT])
    instances = plan_instances(options)
    lines = [*map(str, instances), *plan_pairs(instances)]
    short, long = _questions(reference, model, tokens, max_tokens)
    console.print(f"{model}: prefilled in {prefill}, decoded in {decode}", style="bold")
    for line in lines:
        console.print(line, style="dim", markup=False)
    answers = _ask_deployment(console, options, short, long)
    compared = [answer for answer in answers if answer.name in (OFF, ON)]
    console.print(_table(*compared))
    title = f"{model}: {prefill} to {decode}, a prompt of {len(long.prompt)} tokens"
    timelines = [answer.trace.timeline(answer.name) for answer in compared]
    for suffix in (PICTURE, TRACE):
        console.print(write_timelines(timelines, out / f"timeline{suffix}", title), markup=False)
    return 0 if _check_tokens(console, reference, answers) else 1


def _fetch(model: str) -> str:
    from baton.checkpoint.demo import fetch_demo

    if model != DEMO:
        return model
    try:
        return str(fetch_demo())
    except ConfigError as error:
        # A model that cannot be downloaded is a failure (exit code 1), not misuse.
        raise EngineError(str(error)) from error


def _questions(
    reference: Deployment, model: str, num_tokens: int, max_tokens: int
) -> tuple[Question, Question]:
    """A short one and a long one."""
    tokenizer, context_max = reference.tokenizer, reference.sizes.context_max
    if tokenizer is None:
        raise ConfigError(f"model {model} has no tokenizer; name one that has")
    # A text that was cut may have a few more tokens when it is encoded again, hence half of the room.
    room = (context_max - len(reference.prompt(LONG)) - max_tokens) // 2
    if room < 1:
        raise ConfigError(
            f"the context of {context_max} tokens has no room for a long question and an answer of "
            f"{max_tokens}; give a lower --max-tokens or another --model"
        )
    document = files("baton.cli").joinpath("templates", "demo", "document.txt").read_text(encoding="utf-8")
    cut = tokenizer.encode(document, add_special=False)[: min(num_tokens, room)]
    long = f"{tokenizer.decode(cut)}\n\n{LONG}"
    return (
        Question(CHAT, reference.prompt(CHAT), max_tokens),
        Question(long, reference.prompt(long), max_tokens),
    )


def _ask_deployment(
    console: Console, options: DeploymentOptions, short: Question, long: Question
) -> list[DemoAnswer]:
    answers = []
    with DeploymentProcesses(options, shows_logs=False) as deployment:
        deployment.start()
        keys = settings.api_keys(None)
        client = ApiClient(deployment.url, keys[0] if keys else "")
        console.print(f"sending requests to {deployment.url}", style="dim")
        long_title = f"({len(long.prompt)} tokens, most of them a document) {LONG}"
        for name, title, question in ((SHORT, CHAT, short), (FREE, long_title, long)):
            console.print(f"\n{title}", style="bold")
            answers.append(ask(client, name, question, _print))
            print()
            console.print(figures_text(answers[-1].trace.figures()), style="dim")
        speed, compute_s = _balanced_link(answers[-1].trace)
        console.print(
            f"\nThe same question, with links throttled to {speed / 1e6:.3g} MB/s for each prefill rank, so "
            f"that transfer takes as long as prefill ({human_time(compute_s)}):"
        )
        for name, policy in ((OFF, "off"), (WARM_UP, "cost"), (ON, "cost")):
            if name != ON:  # asked on the instance that has measured its links
                own = override(options.instance, {"link": f"{speed / 1e6:.6f}MB/s", "overlap": policy})
                deployment.restart_prefill(replace(options, instance=own))
            with console.status(name, refresh_per_second=REFRESH_PER_S):
                answers.append(ask(client, name, long))
    return answers


def ask(
    client: ApiClient,
    name: str,
    question: Question,
    show: Callable[[str], None] = lambda text: None,
) -> DemoAnswer:
    """Asks one question and waits for the traces of both sides."""
    model = str(client.get("/v1/models")["data"][0]["id"])
    tokens: list[int] = []
    asked_s, first_s, request_id = monotonic(), 0.0, ""
    for event in client.stream("/v1/chat/completions", question.body(model, name)):
        if event.get("error"):
            raise EngineError(f"{name}: the answer broke off: {event['error']}")
        request_id = event["id"]
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or ()
            first_s = first_s or (monotonic() if tokens else 0.0)
            show(choice["delta"].get("content") or "")
    return DemoAnswer(name, question, tuple(tokens), _fetch_trace(client, request_id, asked_s, first_s))


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _fetch_trace(client: ApiClient, request_id: str, asked_s: float, first_s: float) -> HandoffTrace:
    """The traces of both sides; all processes of a machine share one clock."""
    limit_s = monotonic() + TRACE_S_MAX
    while monotonic() < limit_s:
        traces = {
            job["side"]: msgspec.convert(job["trace"], RequestTrace, str_keys=True)
            for instance in client.get(f"/v1/timelines/{request_id}")["instances"]
            for job in instance["jobs"]
            if job["trace"] is not None
        }
        if "source" in traces and "target" in traces:
            return HandoffTrace(asked_s, first_s, traces["source"], traces["target"])
        time.sleep(POLL_S)
    raise EngineError(f"the trace of {request_id} is not complete after {TRACE_S_MAX:.0f} s")


def _balanced_link(trace: HandoffTrace) -> tuple[float, float]:
    """The slowest link that keeps up with every rank, and the compute time of the rank that needs it."""
    links = []
    for rank, groups in trace.prefill.groups.items():
        num_bytes = sum(copy.num_bytes for copy in trace.prefill.copies.get(rank, ()))
        compute_s = max(group.stop_s for group in groups) - min(group.start_s for group in groups)
        links.append((num_bytes / compute_s, compute_s))
    return max(links)


def _table(off: DemoAnswer, on: DemoAnswer) -> Table:
    table = Table("", off.name, on.name)
    serial = serial_s(off.trace.prefill)
    columns = []
    for answer in (off, on):
        figures = answer.trace.figures()
        efficiency = max(0.0, 1 - figures.exposed_s / max(serial.values()))
        columns.append(
            {
                "queue": human_time(figures.queue_s),
                "compute": human_time(figures.compute_s),
                "exposed transfer": human_time(figures.exposed_s),
                "admission": human_time(figures.admission_s),
                "ttft (first token)": human_time(figures.ttft_s),
                "tth (admitted for decode)": human_time(figures.tth_s),
                "groups of layers": str(figures.num_groups),
                "efficiency (transfer hidden)": f"{efficiency:.2f}",
                "bound (groups of one layer)": f"{answer.trace.bound(serial):.2f}",
            }
        )
    for name, cell in columns[0].items():
        table.add_row(name, cell, columns[1][name])
    return table


def _check_tokens(console: Console, reference: Deployment, answers: Sequence[DemoAnswer]) -> bool:
    """Whether a single instance gives every token of every answer too; prints the count."""
    from baton.engine.deployment import PairRequest

    console.print(f"\nThe same questions to one instance ({REFERENCE}) that prefills and decodes by itself.")
    expected: dict[tuple[int, ...], list[int]] = {}
    with start_engine(reference):
        for question in dict.fromkeys(answer.question for answer in answers):
            _, pieces = reference.ask(PairRequest(question.request()))
            expected[question.prompt] = [sampled.token for piece in pieces for sampled in piece.tokens]
    num_same, num_tokens = 0, 0
    for answer in answers:
        same, longer = count_same(answer.tokens, expected[answer.question.prompt])
        num_same, num_tokens = num_same + same, num_tokens + longer
        if same < longer:
            index = first_difference(answer.tokens, expected[answer.question.prompt])
            console.print(f"{answer.name}: token {index} of the answer differs", markup=False)
    console.print(f"tokens identical: {num_same} of {num_tokens}")
    return num_same == num_tokens


def count_same(tokens: Sequence[int], expected: Sequence[int]) -> tuple[int, int]:
    """How many tokens are equal at the same index, and the length of the longer answer."""
    same = sum(a == b for a, b in zip(tokens, expected, strict=False))
    return same, max(len(tokens), len(expected))


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """The first index at which two answers differ."""
    indices = (index for index, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
    return next(indices, min(len(tokens), len(expected)))
