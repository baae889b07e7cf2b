"""Carries `baton demo` out.

A registry, a prefill and a decode instance and a router start as `baton up` starts them, and all questions go
over HTTP, as any client asks them. A chat question first. Then a long one at the full speed of the transport,
which tells how long a rank takes to compute its layers. The prefill instance starts again behind links on
which sending them takes as long, first without layer pipelining and then with it, and is asked the same. At
the end one instance in one layout is asked everything again, and every token has to be identical.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from time import monotonic
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from baton import settings
from baton.cli.demo import Show
from baton.cli.deployment.options import PREFILL, Engine, Front, Options, instance_parts
from baton.cli.deployment.pairs import pairs, sides
from baton.cli.deployment.running import Running, running
from baton.cli.deployment.showing import Screen
from baton.cli.deployment.talking import Voice
from baton.cli.engine.showing import PICTURE, REFRESH_PER_S, TRACE, figures_text, start, write_timelines
from baton.engine.checkpoint.demo import DEMO, fetch_demo
from baton.engine.config import EngineConfig
from baton.engine.deployment import Deployment, PairRequest
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.trace import HandoffTrace, RequestTrace, serial_s
from baton.errors import ConfigError, EngineError
from baton.plan.printer import human_time

CHAT = "Explain in one sentence what a relay race is."
LONG = "What is the prize of the race?"
SHORT, FREE, MEASURING = "a chat question", "a long question", "measuring the links"
OFF, ON = "layer pipelining off", "layer pipelining on"
ALONE = "tp1"
CHUNK_TOKENS = 4096
"""The long prompt is one prefill chunk, so that what is hidden is hidden by layers alone."""


STORY_S_MAX = 30.0
"""How long after its last token a request's story is waited for: until its pages are back on both sides."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """A text for the endpoint, and what the model reads of it."""

    text: str
    prompt: tuple[int, ...]
    num_tokens_max: int

    def body(self, model: str, name: str) -> dict[str, Any]:
        """As a client asks it; a salt of its own each time, so that no earlier request makes it faster."""
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
        """The same for the engine itself."""
        params = SamplingParams(temperature=0.0, max_tokens=self.num_tokens_max, min_tokens=2)
        return EngineRequest(self.prompt, params)


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one question to the deployment."""

    name: str
    question: Question
    tokens: tuple[int, ...]
    told: HandoffTrace


def run(show: Show) -> bool:
    """Everything, in order; whether all tokens are identical."""
    console = Console(highlight=False, soft_wrap=True)
    alone = Deployment(EngineConfig(_model(show.model), ALONE, "alone", chunk_tokens=CHUNK_TOKENS))
    # Also short prompts are handed over: this is about hand-overs.
    engine, front = Engine(chunk_tokens=CHUNK_TOKENS), Front(port=0, local="never")
    options = Options(show.model, (show.prefill,), (show.decode,), engine=engine, front=front)
    instances = sides(options)
    lines = [*(side.line() for side in instances), *(pair.line() for pair in pairs(options, instances))]
    questions = _questions(alone, show)
    console.print(f"{show.model}: prefilled in {show.prefill}, decoded in {show.decode}", style="bold")
    for line in lines:
        console.print(line, style="dim", markup=False)
    answers = asyncio.run(_conversation(console, options, questions))
    shown = [answer for answer in answers if answer.name in (OFF, ON)]
    console.print(_table(*shown))
    num_tokens = len(questions[-1].prompt)
    title = f"{show.model}: {show.prefill} to {show.decode}, a prompt of {num_tokens} tokens"
    timelines = [answer.told.timeline(answer.name) for answer in shown]
    for suffix in (PICTURE, TRACE):
        console.print(write_timelines(timelines, show.folder / f"timeline{suffix}", title), markup=False)
    return _is_same(console, alone, answers)


def _model(model: str) -> str:
    if model != DEMO:
        return model
    try:
        return str(fetch_demo())
    except ConfigError as error:
        # Nobody misused anything where the model cannot be had.
        raise EngineError(str(error)) from error


def _questions(alone: Deployment, show: Show) -> tuple[Question, Question]:
    """A short one and a long one."""
    tokenizer, context_max = alone.tokenizer, alone.sizes.context_max
    if tokenizer is None:
        raise ConfigError(f"model {show.model} has no tokenizer; name one that has")
    # Text that was cut may become a few tokens more when it is read again, hence half of the room.
    room = (context_max - len(alone.prompt(LONG)) - show.max_tokens) // 2
    if room < 1:
        raise ConfigError(
            f"the context of {context_max} tokens has no room for a long question and an answer of "
            f"{show.max_tokens}; give a lower --max-tokens or another --model"
        )
    document = files("baton.cli").joinpath("templates", "demo", "document.txt").read_text(encoding="utf-8")
    cut = tokenizer.encode(document, add_special=False)[: min(show.num_tokens, room)]
    long = f"{tokenizer.decode(cut)}\n\n{LONG}"
    return (
        Question(CHAT, alone.prompt(CHAT), show.max_tokens),
        Question(long, alone.prompt(long), show.max_tokens),
    )


async def _conversation(
    console: Console, options: Options, questions: tuple[Question, Question]
) -> list[Answered]:
    """All answers of the deployment, in order."""
    screen, answers = Screen(), []
    async with running(options, screen.say_unlogged) as deployment:
        with screen.starting() as show:
            await deployment.start()
            await deployment.ready(show)
        keys = settings.api_keys(None)
        voice = Voice(deployment.url, keys[0] if keys else "")
        console.print(f"asking at {deployment.url}", style="dim")
        for name, text, question in zip((SHORT, FREE), (CHAT, LONG), questions, strict=True):
            what = f"({len(question.prompt)} tokens, most of them a document) {text}"
            console.print(f"\n{text if name == SHORT else what}", style="bold")
            answers.append(await asyncio.to_thread(answered, voice, name, question, _print))
            print()
            console.print(figures_text(answers[-1].told.figures()), style="dim")
        speed, compute_s = _link(answers[-1].told)
        console.print(
            f"\nThe same question, each prefill rank behind a link of {speed / 1e6:.3g} MB/s, on which "
            f"sending what a rank computes takes as long as computing it, {human_time(compute_s)}:"
        )
        for name, overlap in ((OFF, "off"), (MEASURING, None), (ON, None)):
            if name != ON:  # which is asked where the links were measured
                await _restarted(screen, deployment, f"{speed / 1e6:.6f}MB/s", overlap)
            with console.status(name, refresh_per_second=REFRESH_PER_S):
                answers.append(await asyncio.to_thread(answered, voice, name, questions[-1]))
    return answers


async def _restarted(screen: Screen, deployment: Running, link: str, overlap: str | None) -> None:
    """The prefill instance once more, with another link and another way to cut layers."""
    options = deployment.options
    other = replace(options, link=link, engine=replace(options.engine, overlap=overlap))
    parts = instance_parts(other, deployment.registry)
    with screen.starting() as show:
        await deployment.replace(next(part for part in parts if part.role == PREFILL))
        await deployment.ready(show)


def answered(
    voice: Voice, name: str, question: Question, show: Callable[[str], None] = lambda text: None
) -> Answered:
    """Asks, and shows the text as it comes."""
    first_s, identity = 0.0, ""
    tokens: list[int] = []
    model = str(voice.get("/v1/models")["data"][0]["id"])
    asked_s = monotonic()
    for event in voice.stream("/v1/chat/completions", question.body(model, name)):
        if "error" in event:
            raise EngineError(f"{name}: the answer broke off: {event['error']}")
        identity = event["id"]
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or ()
            first_s = first_s or (monotonic() if tokens else 0.0)
            show(choice["delta"].get("content") or "")
    return Answered(name, question, tuple(tokens), _told(voice, identity, asked_s, first_s))


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _told(voice: Voice, identity: str, asked_s: float, first_s: float) -> HandoffTrace:
    """What both sides tell of a request; the clock is the same, since all of this is one machine."""
    limit_s = monotonic() + STORY_S_MAX
    while monotonic() < limit_s:
        stories = {
            job["side"]: msgspec.convert(job["story"], RequestTrace, str_keys=True)
            for instance in voice.get(f"/v1/timelines/{identity}")["instances"]
            for job in instance["jobs"]
            if job["story"] is not None
        }
        if "source" in stories and "target" in stories:
            return HandoffTrace(asked_s, first_s, stories["source"], stories["target"])
        time.sleep(LOOK_S)
    raise EngineError(f"the story of {identity} is not complete after {STORY_S_MAX:.0f} s")


def _link(free: HandoffTrace) -> tuple[float, float]:
    """The slowest link that keeps up with every rank, and how long the rank computes that needs it."""
    found = []
    for rank, groups in free.prefill.groups.items():
        num_bytes = sum(copy.num_bytes for copy in free.prefill.copies.get(rank, ()))
        compute_s = max(group.stop_s for group in groups) - min(group.start_s for group in groups)
        found.append((num_bytes / compute_s, compute_s))
    return max(found)


def _table(off: Answered, on: Answered) -> Table:
    table = Table("", off.name, on.name)
    serial = serial_s(off.told.prefill)
    columns = []
    for answer in (off, on):
        found = answer.told.figures()
        efficiency = max(0.0, 1 - found.exposed_s / max(serial.values()))
        columns.append(
            {
                "queue": human_time(found.queue_s),
                "compute": human_time(found.compute_s),
                "exposed transfer": human_time(found.exposed_s),
                "admission": human_time(found.admission_s),
                "ttft (first token)": human_time(found.ttft_s),
                "tth (admitted for decode)": human_time(found.tth_s),
                "groups of layers": str(found.num_groups),
                "efficiency (transfer hidden)": f"{efficiency:.2f}",
                "bound (groups of one layer)": f"{answer.told.bound(serial):.2f}",
            }
        )
    for name, cell in columns[0].items():
        table.add_row(name, cell, columns[1][name])
    return table


def _is_same(console: Console, alone: Deployment, answers: Sequence[Answered]) -> bool:
    """Whether one instance in one layout gives every token of every answer too; it says so."""
    console.print(f"\nThe same questions to one instance ({ALONE}) that prefills and decodes by itself.")
    expected: dict[tuple[int, ...], list[int]] = {}
    with start(alone):
        for question in dict.fromkeys(answer.question for answer in answers):
            _, pieces = alone.ask(PairRequest(question.request()))
            expected[question.prompt] = [sampled.token for piece in pieces for sampled in piece.tokens]
    counts = []
    for answer in answers:
        wanted_tokens = expected[answer.question.prompt]
        counts.append(num_same(answer.tokens, wanted_tokens))
        if counts[-1][0] < counts[-1][1]:
            where = first_difference(answer.tokens, wanted_tokens)
            console.print(f"{answer.name}: token {where} of the answer differs", markup=False)
    found, wanted = sum(same for same, _ in counts), sum(whole for _, whole in counts)
    console.print(f"tokens identical: {found} of {wanted}")
    return found == wanted


def num_same(found: Sequence[int], wanted: Sequence[int]) -> tuple[int, int]:
    """How many tokens are the same at the same place, of how many there are in the longer answer."""
    same = sum(a == b for a, b in zip(found, wanted, strict=False))
    return same, max(len(found), len(wanted))


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int:
    """The first place at which two answers are not the same, counted from 0."""
    places = (place for place, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b)
    return next(places, min(len(found), len(wanted)))
