"""What a caller asks of an instance, and what it hears back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.engine.commands import CopyRecord, LayerGroupTiming, SampledToken
from baton.engine.sampling.params import SamplingParams
from baton.plan.overlap import LayerTimes, choose
from baton.protocol.outcomes import Cause


@dataclass(frozen=True, slots=True)
class Outbound:
    """The prompt is handed over as it is computed; decoding goes on elsewhere."""

    transfer: str
    is_pipelined: bool = True
    policy: str | None = None
    """Where its layers are cut; None: as the instance does."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            choose(self.policy, LayerTimes((0.0,), (0.0,), 0.0), 1)


@dataclass(frozen=True, slots=True)
class Inbound:
    """The prompt's cache comes from a source, named by its instance or its coordinator's host:port."""

    transfer: str
    source: str
    source_dp: int | None = None
    is_early: bool = True
    """Whether first tokens are told as soon as the source has them, before the cache is here; if the
    hand-over fails after that, the request does."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One request; it may be the rest of one that was answered in part."""

    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    hand: Outbound | Inbound | None = None
    """None: prefilled and decoded here."""
    salt: str = ""
    """Requests with another salt never share a prefix."""
    embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) in place of the token ids, which then only count."""
    generated: tuple[int, ...] = ()
    """Tokens that were answered already, elsewhere: the answer goes on behind them as if it had been one."""
    index: int = 0
    """Which of several answers this one is, for its randomness and its pieces; n has to be 1 then."""

    @property
    def known(self) -> tuple[int, ...]:
        """The prompt and what was answered already: what is prefilled and handed over."""
        return self.tokens + self.generated

    @property
    def num_known(self) -> int:
        """How many these are."""
        return len(self.tokens) + len(self.generated)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one of a request's answers has grown by, and its end when `finish` says why."""

    index: int
    tokens: tuple[SampledToken, ...]
    text: str
    finish: str | None = None
    """stop, length or abort; `handed` at a source whose target goes on."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The request failed; nothing more will come."""

    cause: Cause | None
    text: str


@dataclass(slots=True)
class Story:
    """What became of a request when, in seconds of the machine's monotonic clock; 0 where it did not."""

    arrived_s: float
    begun_s: float = 0.0
    """Its first step was sent to the ranks, or its pages were reserved."""
    prompt_s: float = 0.0
    """The last layer of its prompt was computed."""
    token_s: float = 0.0
    """Its first token was told."""
    settled_s: float = 0.0
    """The hand-over's verdict was here."""
    stepped_s: float = 0.0
    """Its first decode step was through."""
    ended_s: float = 0.0
    num_cached: int = 0
    num_held: int = 0
    groups: dict[int, list[LayerGroupTiming]] = field(default_factory=dict)
    """By rank: what was computed of the prompt."""
    copies: dict[int, list[CopyRecord]] = field(default_factory=dict)
    unpipelined: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """The story of a request is complete: its pages are back."""

    story: Story


Event: TypeAlias = Piece | Trouble | Told
Sink: TypeAlias = Callable[[Event], None]
"""Called on the instance's thread; it must neither block nor raise."""
