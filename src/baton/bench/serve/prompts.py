"""Prompts that no cache has seen, of a wanted length, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.bench.serve.options import Load

Prompt = tuple[int, ...] | str

WORDS_FROM = 300
"""Ids below are often special tokens and single bytes, which a model goes on with: such answers have tokens
without text. A vocabulary that is not much larger has none to spare."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name"
)
WORDS = tuple(_WORDS.split(" "))
"""Common enough to be one token each, behind a space, for most tokenizers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request before it is sent."""

    prompt: Prompt
    num_answer: int


def make_prompt(source: random.Random, num_tokens: int, vocabulary: int) -> Prompt:
    """Token ids, or words about as many where there is no vocabulary to draw from."""
    if vocabulary:
        lowest = WORDS_FROM if vocabulary > 2 * WORDS_FROM else 0
        return tuple(source.randrange(lowest, vocabulary) for _ in range(num_tokens))
    return " ".join(source.choices(WORDS, k=num_tokens))


def join(first: Prompt, second: Prompt) -> Prompt:
    """One prompt behind the other, both of the same form."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}".strip()
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return first + second


def make_wanted(load: Load, vocabulary: int) -> tuple[list[Wanted], list[Wanted]]:
    """The requests for warming up, and those of the run."""
    source = random.Random(load.seed)
    shared = make_prompt(source, load.num_shared, vocabulary)

    def one() -> Wanted:
        num_own = load.input_tokens.draw(source) - load.num_shared
        prompt = join(shared, make_prompt(source, num_own, vocabulary)) if load.num_shared else None
        if prompt is None:
            prompt = make_prompt(source, num_own, vocabulary)
        return Wanted(prompt, load.output_tokens.draw(source))

    run = [one() for _ in range(load.num_requests)]
    return [one() for _ in range(load.num_warmup)], run
