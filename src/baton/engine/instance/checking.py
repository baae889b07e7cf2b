"""Refuses requests that could never be served, before they are queued."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.books.scheduler import Scheduler
from baton.engine.instance.record import Facts
from baton.engine.requests import Generate, Outbound
from baton.engine.sampling_params import Progress, check_params, ending
from baton.errors import ConfigError


def check_request(request: Generate, facts: Facts, books: Scheduler, vocab_size: int) -> None:
    """Raises ConfigError, naming the value and the remedy; any thread may ask."""
    check_params(request.params, vocab_size, facts.eos_ids)
    _check_rest(request, facts)
    _check_length(request, facts, books)
    if request.embeddings is not None and books.shares.num_ahead:
        raise ConfigError("input embeddings where drafts run; give token ids, or start without drafts")
    wrong = next(_unknown(request, vocab_size), None)
    if wrong is not None:
        token, where = wrong
        raise ConfigError(f"token {token} of the {where} is not one of the {vocab_size} in the vocabulary")


def _check_rest(request: Generate, facts: Facts) -> None:
    """Of a request that goes on where another one was left."""
    generated, params = request.generated, request.params
    if request.index < 0:
        raise ConfigError(f"index {request.index}: answers are counted from 0")
    if not generated and not request.index:
        return
    if params.n != 1:
        raise ConfigError(f"n is {params.n}: the rest of an answer, or one by its index, is asked for alone")
    if not generated:
        return
    if request.embeddings is not None:
        raise ConfigError("generated tokens behind input embeddings; give the prompt as token ids")
    if len(generated) >= params.max_tokens:
        raise ConfigError(
            f"{len(generated)} generated tokens and max_tokens {params.max_tokens}: the answer is complete"
        )
    # Its length apart, which has words of its own.
    progress = Progress(generated[-1], len(generated), 0, 1)
    if ending(progress, params, facts.eos_ids) is not None:
        raise ConfigError(f"the last generated token, {generated[-1]}, ends the answer: it is complete")


def _check_length(request: Generate, facts: Facts, books: Scheduler) -> None:
    limit, num_known = facts.context_max, request.num_known
    if not request.tokens or num_known >= limit:
        raise ConfigError(
            f"a prompt of {num_known} tokens; give 1 to {limit - 1}: the context has {limit}, "
            "one of them for the answer"
        )
    num_wanted = request.params.max_tokens - len(request.generated)
    num_most = books.num_tokens_max(num_known)
    if not isinstance(request.hand, Outbound) and num_known + num_wanted > num_most:
        raise ConfigError(
            f"a prompt of {num_known} tokens and max_tokens {num_wanted}: together at most {num_most}; "
            "ask for fewer, or give the pool more tokens"
        )


def _unknown(request: Generate, vocab_size: int) -> Iterator[tuple[int, str]]:
    if request.embeddings is None:
        yield from ((each, "prompt") for each in request.tokens if not 0 <= each < vocab_size)
    yield from ((each, "answer") for each in request.generated if not 0 <= each < vocab_size)
