"""What a caller submits to an instance, and the events it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.engine.commands import SampledToken
from baton.engine.sampling_params import SamplingParams
from baton.engine.trace import RequestTrace
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


@dataclass(frozen=True, slots=True)
class RequestError:
    """The request failed; no event follows."""

    cause: Cause | None
    text: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request that did not fail: its pages are free and its trace is complete."""

    trace: RequestTrace


RequestEvent: TypeAlias = OutputChunk | RequestError | RequestFinished
EventSink: TypeAlias = Callable[[RequestEvent], None]
"""Called on the instance's thread; it must neither block nor raise."""
