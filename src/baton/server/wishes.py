"""How answers are to be sampled, from what a request says."""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.sampling_params import SamplingParams
from baton.server.bodies.asked import (
    Body,
    ChatRequest,
    CompletionRequest,
    Extended,
    GenerateParams,
    GenerateRequest,
)
from baton.web.problems import Problem, refused

TOKENS_DEFAULT = {CompletionRequest: 16, GenerateRequest: 128}
"""Of an answer where the request says nothing; a chat has as many as fit."""


def wishes(body: Body, seed: int) -> SamplingParams:
    """The parameters of every answer; `seed` where it has none, max_tokens 0 where it says nothing."""
    match body:
        case CompletionRequest():
            n, num_tokens = body.n or 1, body.max_tokens or 0
            if body.best_of not in (None, n):
                raise refused("best_of", body.best_of, f"answers are not chosen among; use n, which is {n}")
            return _of_openai(body, num_tokens, body.logprobs, seed)
        case ChatRequest():
            if body.top_logprobs is not None and not body.logprobs:
                raise refused("top_logprobs", body.top_logprobs, "set logprobs to true too")
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            num_tokens = body.max_completion_tokens or body.max_tokens or 0
            return _of_openai(body, num_tokens, num_logprobs, seed)
        case GenerateRequest():
            return _of_generate(body, seed)


def _of_openai(body: Extended, max_tokens: int, logprobs: int | None, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias, "logit_bias"),
        seed=seed if body.seed is None else body.seed,
        stop=_stop(body.stop),
        stop_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        n=body.n or 1,
        logprobs=logprobs,
    )


def _of_generate(body: GenerateRequest, seed: int) -> SamplingParams:
    found = body.sampling_params or GenerateParams()
    return SamplingParams(
        temperature=_or(found.temperature, 1.0),
        top_k=max(0, found.top_k or 0),
        top_p=_or(found.top_p, 1.0),
        min_p=found.min_p or 0.0,
        repetition_penalty=_or(found.repetition_penalty, 1.0),
        presence_penalty=found.presence_penalty or 0.0,
        frequency_penalty=found.frequency_penalty or 0.0,
        logit_bias=_bias(found.logit_bias, "sampling_params.logit_bias"),
        seed=seed if found.sampling_seed is None else found.sampling_seed,
        stop=_stop(found.stop),
        stop_ids=tuple(found.stop_token_ids or ()),
        min_tokens=found.min_new_tokens or 0,
        max_tokens=found.max_new_tokens or 0,
        ignore_eos=bool(found.ignore_eos),
        n=found.n or 1,
        logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop(found: str | list[str] | None) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else tuple(found or ())


def _bias(found: Mapping[str, float] | None, param: str) -> dict[int, float]:
    wrong = next(
        (key for key in found or () if not (key.isascii() and key.isdigit() and len(key) < 10)), None
    )
    if wrong is not None:
        raise Problem(400, f"{param} has the key {wrong[:20]!a}: give token ids", param=param)
    return {int(key): value for key, value in (found or {}).items()}
