"""What a caller submits to an instance, what is refused, and the events it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.engine.commands import SampledToken
from baton.engine.sampling_params import Progress, SamplingParams, check_params, ending
from baton.engine.scheduler import Scheduler
from baton.engine.tokenizer import Tokenizer
from baton.engine.trace import RequestTrace
from baton.errors import ConfigError, ContextError
from baton.plan.overlap import LayerTimes, choose
from baton.protocol.outcomes import Cause


@dataclass(frozen=True, slots=True)
class OutboundHandoff:
    """The prompt is sent to a target as it is computed; decoding continues there."""

    transfer: str
    is_pipelined: bool = True
    policy: str | None = None
    """The overlap policy; None: the instance's."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            choose(self.policy, LayerTimes((0.0,), (0.0,), 0.0), 1)


@dataclass(frozen=True, slots=True)
class InboundHandoff:
    """The prompt's KV cache comes from a source: an instance's name, or its coordinator's host:port."""

    transfer: str
    source: str
    source_dp: int | None = None
    is_early: bool = True
    """Whether first tokens are output as soon as the source has them, before the cache is here. If the
    hand-over fails after that, the request fails."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request; it may continue an answer that another instance began."""

    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    handoff: OutboundHandoff | InboundHandoff | None = None
    """None: prefilled and decoded here."""
    salt: str = ""
    """Requests with different salts never share a prefix."""
    embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) instead of the token ids, which then only count."""
    generated: tuple[int, ...] = ()
    """Tokens that another instance generated already; this answer continues them."""
    index: int = 0
    """Which of several answers this is, for its randomness and its output; n has to be 1 then."""
    dp: int | None = None
    """The dp group that computes it; None: the one with the fewest tokens."""

    @property
    def known(self) -> tuple[int, ...]:
        """The prompt and what was generated already: what is prefilled and handed over."""
        return self.tokens + self.generated

    @property
    def num_known(self) -> int:
        return len(self.tokens) + len(self.generated)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New tokens of one of a request's answers; `finish` is set on the last chunk."""

    index: int
    tokens: tuple[SampledToken, ...]
    text: str
    finish: str | None = None
    """stop, length or abort; `handed` at a source whose target continues."""
    prompt_logprobs: Sequence[SampledToken] = ()
    """On the first chunk of an answer that asks for them: the prompt from its second token on."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """The request failed; once its pages are free, RequestFinished follows, unless the instance has ended."""

    cause: Cause | None
    """None: it waited longer than `queue_s_max`."""
    text: str
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request: its pages are free and its trace is complete."""

    trace: RequestTrace


RequestEvent: TypeAlias = OutputChunk | RequestError | RequestFinished
EventSink: TypeAlias = Callable[[RequestEvent], None]
"""Called on the instance's thread; it must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What the answers of a model depend on."""

    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    vocab_size: int
    hidden_size: int
    context_max: int


def check_request(request: EngineRequest, model: ModelContext, scheduler: Scheduler) -> None:
    """Raises ConfigError, with the value and the remedy, on a request that could never be served."""
    check_params(request.params, model.vocab_size, model.eos_ids)
    if request.params.grammar:
        if model.tokenizer is None:
            raise ConfigError("a grammar, but the model has no tokenizer; leave the grammar out")
        model.tokenizer.check_grammar(request.params.grammar, model.vocab_size, model.eos_ids)
    if request.index < 0:
        raise ConfigError(f"index {request.index}: answers are counted from 0")
    if (request.generated or request.index) and request.params.n != 1:
        raise ConfigError(
            f"n is {request.params.n}: the rest of an answer, or one by its index, is asked for alone"
        )
    if request.generated:
        _check_continuation(request, model)
    limit, num_known = model.context_max, request.num_known
    if not request.tokens or num_known >= limit:
        raise ContextError(
            f"a prompt of {num_known} tokens; give 1 to {limit - 1}: the context has {limit}, "
            "one of them for the answer"
        )
    num_wanted = request.params.max_tokens - len(request.generated)
    num_fit = scheduler.num_tokens_max(num_known)
    if not isinstance(request.handoff, OutboundHandoff) and num_known + num_wanted > num_fit:
        raise ContextError(
            f"a prompt of {num_known} tokens and max_tokens {num_wanted}: together at most {num_fit}; "
            "ask for fewer, or give the pool more tokens"
        )
    if request.embeddings is not None and scheduler.geometry.num_lookahead:
        raise ConfigError(
            "drafts cannot be combined with input embeddings; give token ids, or start without drafts"
        )
    if request.params.prompt_logprobs is not None and (request.handoff or request.embeddings):
        raise ConfigError(
            "no log-probabilities for a prompt that is handed over, or of embeddings; give token ids, and "
            "have one instance prefill and decode them"
        )
    prompt = request.tokens if request.embeddings is None else ()
    for name, tokens in (("prompt", prompt), ("answer", request.generated)):
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise ConfigError(
                    f"token {token} of the {name} is not one of the {model.vocab_size} in the vocabulary"
                )


def _check_continuation(request: EngineRequest, model: ModelContext) -> None:
    generated, params = request.generated, request.params
    if request.embeddings is not None:
        raise ConfigError("generated tokens behind input embeddings; give the prompt as token ids")
    if len(generated) >= params.max_tokens:
        raise ConfigError(
            f"{len(generated)} generated tokens and max_tokens {params.max_tokens}: the answer is complete"
        )
    # The context length is checked for all requests.
    progress = Progress(generated[-1], len(generated), 0, 1)
    if ending(progress, params, model.eos_ids) is not None:
        raise ConfigError(f"the last generated token, {generated[-1]}, ends the answer: it is complete")
