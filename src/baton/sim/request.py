"""What a client asked for, and each attempt to hand it over."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from baton.protocol.outcomes import Aux


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was typed, as one side tokenised it."""

    salt: int
    num_tokens: int

    @property
    def digest(self) -> bytes:
        """What both sides have to agree on."""
        return hashlib.blake2b(f"{self.salt}/{self.num_tokens}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ends:
    """Which instances and which of their dp groups."""

    source: str
    target: str
    source_dp: int = 0
    target_dp: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One transfer: both legs of one try."""

    tag: int
    """Positive, unlike that of any other attempt; what pools know it by."""
    transfer: str
    request: int
    number: int
    ends: Ends
    source_prompt: Prompt
    target_prompt: Prompt

    @property
    def aux(self) -> Aux:
        """What the rank that samples will say."""
        salt = self.source_prompt.salt
        return Aux(tokens=(salt % 50_000,), sampler_position=self.source_prompt.num_tokens)


@dataclass(slots=True)
class Request:
    """What a client asked for."""

    number: int
    prompts: tuple[Prompt, Prompt]
    """As the source and as the target tokenise it; the same unless something is wrong."""
    ends: Ends
    attempts: list[Attempt] = field(default_factory=list)
    is_done: bool = False
