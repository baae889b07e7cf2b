"""A tiny checkpoint that speaks, and what it has to say: greedy tokens of `transformers`, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tests.cli.models import speaking_model
from tests.engine import tiny
from tests.engine.text.vocabularies import byte_level

from baton.engine.tokenizer import Tokenizer

EOS = 0
"""The token that ends an answer of the tiny checkpoint."""
NUM_TEXT_IDS = 351
"""Below this every id of the tiny checkpoint's vocabulary has a spelling."""
MARGIN_MIN = 1e-3
"""How far the likeliest token has to be ahead, in its logit, for two orders of summation to agree on it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A greedy answer: the token that ended it is the last of `tokens` and has no text."""

    tokens: tuple[int, ...]
    text: str
    finish: str
    margin: float
    """By how much the closest decision was decided."""

    @property
    def is_certain(self) -> bool:
        """Whether every layout has to find these tokens, whatever the order of its sums."""
        return self.margin >= MARGIN_MIN


@cache
def model() -> Path:
    """The checkpoint, in a folder that is removed when the process ends."""
    return speaking_model(tiny._session_folder())


@cache
def tokenizer() -> Tokenizer:
    """Its tokenizer, as the engine reads it."""
    return Tokenizer(byte_level())


def encode(text: str) -> list[int]:
    """Token ids of a prompt that is sent as text."""
    return tokenizer().encode(text)


def chat_ids(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat."""
    return tokenizer().chat(messages)


def oracle_text(
    prompt: str | Sequence[int], max_tokens: int = 16, *, ignore_eos: bool = False, stop: str | None = None
) -> Expected:
    """What greedy decoding has to answer to a text or to token ids."""
    ids = tuple(encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    tokens, margins = _greedy(ids, max_tokens)
    finish = "length"
    if not ignore_eos and EOS in tokens:
        num_kept = tokens.index(EOS) + 1
        tokens, margins, finish = tokens[:num_kept], margins[:num_kept], "stop"
    if stop is not None:
        found = _up_to(tokens, stop)
        if found is not None:
            num_kept, text = found
            return Expected(tokens[:num_kept], text, "stop", min(margins[:num_kept]))
    text = tokenizer().decode([token for token in tokens if token != EOS or ignore_eos])
    return Expected(tokens, text, finish, min(margins, default=float("inf")))


def _up_to(tokens: Sequence[int], stop: str) -> tuple[int, str] | None:
    """How many tokens it takes until their text has the stop string, and the text before it."""
    for num_tokens in range(1, len(tokens) + 1):
        text = tokenizer().decode(tokens[:num_tokens])
        if stop in text:
            return num_tokens, text[: text.index(stop)]
    return None


@cache
def _greedy(prompt: tuple[int, ...], num_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens past eos too, and by how much each was ahead of the next best."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            found = tiny._loaded(str(model())).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
    finally:
        torch.set_num_threads(num_threads)
    best = torch.stack([logits[0] for logits in found.logits]).float().topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    return tuple(found.sequences[0, len(prompt) :].tolist()), tuple(margins)
