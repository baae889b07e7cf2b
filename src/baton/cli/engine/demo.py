"""Carries `baton demo` out.

A chat question first. Then a long one at the full speed of the transport, which tells how long a rank takes
to compute its layers; the prefill instance starts again behind links on which sending them takes as long, and
the same question goes over those with layer pipelining off and on. At the end one instance in one layout is
asked the same, and every token has to be identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from baton.cli.demo import Show
from baton.cli.engine.showing import (
    PICTURE,
    REFRESH_PER_S,
    TRACE,
    figures_text,
    progressing,
    size_lines,
    start,
    write_timelines,
)
from baton.engine.checkpoint.demo import DEMO, fetch_demo
from baton.engine.deployment import Deployment, told
from baton.engine.instance.config import InstanceConfig
from baton.engine.pair import Ask
from baton.engine.requests import Generate
from baton.engine.sampling.params import SamplingParams
from baton.engine.stories import Told, serial_s
from baton.errors import ConfigError, EngineError
from baton.plan.printer import human_time

CHAT = "Explain in one sentence what a relay race is."
LONG = "What is the prize of the race?"
SHORT, FREE, MEASURING = "a chat question", "a long question", "measuring the links"
OFF, ON = "layer pipelining off", "layer pipelining on"
ALONE = "tp1"
CHUNK_TOKENS = 4096
"""The long prompt is one prefill chunk, so that what is hidden is hidden by layers alone."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one question to the pair."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    told: Told


def run(show: Show) -> bool:
    """Everything, in order; whether all tokens are identical."""
    console = Console(highlight=False, soft_wrap=True)
    config = InstanceConfig(_model(show.model), chunk_tokens=CHUNK_TOKENS)
    pair = Deployment(replace(config, layout=show.prefill), replace(config, layout=show.decode))
    chat, long = _questions(pair, show)
    console.print(f"{show.model}: prefilled in {show.prefill}, decoded in {show.decode}", style="bold")
    for line in size_lines(pair):
        console.print(line, style="dim", markup=False)
    params = SamplingParams(temperature=0.0, max_tokens=show.max_tokens, min_tokens=2)
    with start(pair):
        answers = list(_first(console, pair, (chat, long), params))
        answers += _throttled(console, pair, answers[-1], params)
        console.print(_table(*answers[-2:]))
    title = f"{show.model}: {show.prefill} to {show.decode}, a prompt of {len(long)} tokens"
    timelines = [answer.told.timeline(answer.name) for answer in answers[-2:]]
    for suffix in (PICTURE, TRACE):
        console.print(write_timelines(timelines, show.folder / f"timeline{suffix}", title), markup=False)
    return _is_same(console, config, answers, params)


def _model(model: str) -> str:
    if model != DEMO:
        return model
    try:
        return str(fetch_demo())
    except ConfigError as error:
        # Nobody misused anything where the model cannot be had.
        raise EngineError(str(error)) from error


def _questions(pair: Deployment, show: Show) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A short prompt and a long one, in tokens."""
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise ConfigError(f"model {show.model} has no tokenizer; name one that has")
    context_max = min(instance.sizes.context_max for instance in pair.instances)
    # Text that was cut may become a few tokens more when it is read again, hence half of the room.
    room = (context_max - len(pair.prompt(LONG)) - show.max_tokens) // 2
    if room < 1:
        raise ConfigError(
            f"the context of {context_max} tokens has no room for a long question and an answer of "
            f"{show.max_tokens}; give a lower --max-tokens or another --model"
        )
    document = files("baton.cli").joinpath("templates", "demo", "document.txt").read_text(encoding="utf-8")
    cut = tokenizer.encode(document, add_special=False)[: min(show.num_tokens, room)]
    return pair.prompt(CHAT), pair.prompt(f"{tokenizer.decode(cut)}\n\n{LONG}")


def _first(
    console: Console, pair: Deployment, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> Iterator[Answered]:
    """Both questions at full speed, with their answers as they come."""
    for name, text, prompt in zip((SHORT, FREE), (CHAT, LONG), prompts, strict=True):
        what = f"({len(prompt)} tokens, most of them a document) {text}" if name == FREE else text
        console.print(f"\n{what}", style="bold")
        # A salt of its own each time: nothing is faster for a prefix that an earlier request left behind.
        found = answered(pair, name, Ask(Generate(prompt, params, salt=name)), _print)
        print()
        console.print(figures_text(found.told.figures()), style="dim")
        yield found


def _throttled(
    console: Console, pair: Deployment, free: Answered, params: SamplingParams
) -> Iterator[Answered]:
    """The long question over links as fast as a rank computes: one to measure them by, then off and on."""
    speed, compute_s = _link(free.told)
    console.print(
        f"\nThe same question, each prefill rank behind a link of {speed / 1e6:.3g} MB/s, on which sending "
        f"what a rank computes takes as long as computing it, {human_time(compute_s)}:"
    )
    with progressing("starting prefill again", pair.sizes.layout.num_ranks) as progress:
        pair.throttle(speed, progress)
    for name in (MEASURING, OFF, ON):
        with console.status(name, refresh_per_second=REFRESH_PER_S):
            ask = Ask(Generate(free.prompt, params, salt=name), is_pipelined=name != OFF)
            yield answered(pair, name, ask)


def answered(
    model: Deployment, name: str, ask: Ask, show: Callable[[str], None] = lambda text: None
) -> Answered:
    """Asks, and shows the text as it comes."""
    answer, pieces = model.ask(ask)
    tokens: list[int] = []
    for piece in pieces:
        tokens.extend(sampled.token for sampled in piece.tokens)
        show(piece.text)
    found = told(answer)
    assert found is not None, "the pair answers two tokens at least, so it hands over"
    return Answered(name, ask.request.tokens, tuple(tokens), found)


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _link(free: Told) -> tuple[float, float]:
    """The slowest link that keeps up with every rank, and how long the rank computes that needs it."""
    found = []
    for rank, groups in free.prefill.groups.items():
        num_bytes = sum(copy.num_bytes for copy in free.prefill.copies.get(rank, ()))
        compute_s = max(group.stop_s for group in groups) - min(group.start_s for group in groups)
        found.append((num_bytes / compute_s, compute_s))
    return max(found)


def _table(off: Answered, on: Answered) -> Table:
    table = Table("", off.name, on.name)
    serial = serial_s(off.told)
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


def _is_same(
    console: Console, config: InstanceConfig, answers: Sequence[Answered], params: SamplingParams
) -> bool:
    """Whether one instance in one layout gives every token of every answer too; it says so."""
    console.print(f"\nThe same questions to one instance ({ALONE}) that prefills and decodes by itself.")
    expected: dict[tuple[int, ...], list[int]] = {}
    with start(Deployment(replace(config, layout=ALONE, name="alone"))) as alone:
        for prompt in dict.fromkeys(answer.prompt for answer in answers):
            _, pieces = alone.ask(Ask(Generate(prompt, params)))
            expected[prompt] = [sampled.token for piece in pieces for sampled in piece.tokens]
    counts = []
    for answer in answers:
        counts.append(num_same(answer.tokens, expected[answer.prompt]))
        if counts[-1][0] < counts[-1][1]:
            where = first_difference(answer.tokens, expected[answer.prompt])
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
