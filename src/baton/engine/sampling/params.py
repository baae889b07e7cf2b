"""How an answer is sampled and when it ends."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """One request's wishes; the defaults are those of the OpenAI API, neutral where that has none."""

    temperature: float = 1.0
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """Randomness is a function of the seed, the answer's index and the position, on any instance."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """How many of the likeliest tokens are told with each token, besides its own; None: none at all."""
