"""How an answer is sampled and when it ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from baton.errors import ConfigError


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
    """How many of the likeliest tokens are reported with each token, besides its own; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    grammar: str = ""
    """What the answer has to match (baton.engine.grammar); empty: anything."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that the text has in any case, as those that mark tool calls."""


# Refuses sampling parameters that no sampler could honour, before a request is queued.


NUM_ANSWERS_MAX = 128
NUM_LOGPROBS_MAX = 100
NUM_STOPS_MAX = 16
PENALTY_MAX = 2.0
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
"""Far beyond what is useful, and logits stay finite: without a finite one an instance ends."""
BIAS_MAX = 100.0
COUNT_MAX = 2**31


def check_params(params: SamplingParams, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
    """Raises ConfigError, naming field, value and remedy, for the first parameter that cannot be used."""
    for checks in (_numbers(params), _counts(params, vocab_size), _ids(params, vocab_size, eos_ids)):
        for field, is_good, remedy in checks:
            if not is_good:
                raise ConfigError(f"{field} is {getattr(params, field)!r}: {remedy}")


STATED_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a generation_config.json may state."""


def sampling_defaults(stated: Mapping[str, object], vocab_size: int) -> SamplingParams:
    """What requests get that say nothing: of generation_config.json as vLLM reads it, else OpenAI's."""
    given = {name: stated[name] for name in STATED_DEFAULTS if stated.get(name) is not None}
    try:
        if given.get("top_k") == -1:
            del given["top_k"]  # another way to say: all
        params = msgspec.convert(given, SamplingParams)
        check_params(params, vocab_size)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"generation_config.json: {error}; correct the file, or do without its sampling defaults "
            "(--generation-config none)"
        ) from None
    return params


def _numbers(params: SamplingParams) -> Iterator[tuple[str, bool, str]]:
    """Comparisons are false for NaN, so each is phrased as what must hold."""
    temperature, repetition = params.temperature, params.repetition_penalty
    yield "temperature", 0 <= temperature < math.inf, "give a finite number of at least 0 (0: greedy)"
    yield "top_p", 0 < params.top_p <= 1, "give a number above 0 and at most 1 (1: all tokens)"
    yield "min_p", 0 <= params.min_p <= 1, "give a number from 0 to 1 (0: all tokens)"
    is_good = REPETITION_MIN <= repetition <= REPETITION_MAX
    yield (
        "repetition_penalty",
        is_good,
        f"give a number from {REPETITION_MIN} to {REPETITION_MAX:g} (1: none)",
    )
    for field in ("presence_penalty", "frequency_penalty"):
        is_good = abs(getattr(params, field)) <= PENALTY_MAX
        yield field, is_good, f"give a number from {-PENALTY_MAX} to {PENALTY_MAX} (0: none)"
    yield "seed", -(2**63) <= params.seed < 2**64, "give a whole number of 64 bits"


def _counts(params: SamplingParams, vocab_size: int) -> Iterator[tuple[str, bool, str]]:
    num_logprobs_max = min(NUM_LOGPROBS_MAX, vocab_size)
    yield "top_k", 0 <= params.top_k <= COUNT_MAX, f"give a count from 0 to {COUNT_MAX} (0: all tokens)"
    yield "n", 1 <= params.n <= NUM_ANSWERS_MAX, f"ask for 1 to {NUM_ANSWERS_MAX} answers"
    yield "max_tokens", 1 <= params.max_tokens <= COUNT_MAX, f"ask for 1 to {COUNT_MAX} tokens"
    is_reachable = 0 <= params.min_tokens <= params.max_tokens
    yield "min_tokens", is_reachable, f"give a count from 0 to max_tokens, which is {params.max_tokens}"
    for field in ("logprobs", "prompt_logprobs"):
        is_good = 0 <= (getattr(params, field) or 0) <= num_logprobs_max
        yield field, is_good, f"give a count from 0 to {num_logprobs_max}, or leave it out"
    yield "stop", len(params.stop) <= NUM_STOPS_MAX, f"give at most {NUM_STOPS_MAX} stop strings"
    yield "stop", all(params.stop), "give no empty stop string"
    for field in ("min_tokens", "ignore_eos"):
        is_free = not (params.grammar and getattr(params, field))
        yield field, is_free, "a structured output ends where its format does; leave one of the two out"


def _ids(
    params: SamplingParams, vocab_size: int, eos_ids: Collection[int]
) -> Iterator[tuple[str, bool, str]]:
    remedy = f"give token ids from 0 to {vocab_size - 1}"
    yield "stop_ids", all(0 <= token < vocab_size for token in params.stop_ids), remedy
    yield "logit_bias", all(0 <= token < vocab_size for token in params.logit_bias), remedy
    is_mild = all(abs(bias) <= BIAS_MAX for bias in params.logit_bias.values())
    yield "logit_bias", is_mild, f"give values from {-BIAS_MAX} to {BIAS_MAX}"
    # Stop ids cannot be sampled before min_tokens, so something else has to be left.
    can_go_on = params.min_tokens == 0 or len({*params.stop_ids, *eos_ids}) < vocab_size
    yield "stop_ids", can_go_on, "leave tokens that do not stop, or set min_tokens to 0"


# When an answer is over.


Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Progress:
    """An answer right after a token, which counts already."""

    last_token: int
    num_generated: int
    num_tokens: int
    """Prompt and answer."""
    context_max: int
    has_stop_string: bool = False
    """Whether its text has come upon a stop string (baton.engine.tokenizer)."""


def ending(progress: Progress, params: SamplingParams, eos_ids: Collection[int]) -> Finish | None:
    """Why the answer is over, or None; where it stops and is full at once it stopped."""
    is_stopped = ends_with(progress.last_token, progress.num_generated, params, eos_ids)
    if is_stopped or (progress.has_stop_string and progress.num_generated > params.min_tokens):
        return "stop"
    is_full = progress.num_generated >= params.max_tokens or progress.num_tokens >= progress.context_max
    return "length" if is_full else None


def ends_with(token: int, num_generated: int, params: SamplingParams, eos_ids: Collection[int]) -> bool:
    """Whether a token, the answer's last so far, ends it by itself; it is then no part of the text."""
    if num_generated <= params.min_tokens:
        return False
    return token in params.stop_ids or (not params.ignore_eos and token in eos_ids)
