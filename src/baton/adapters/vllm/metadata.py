"""The metadata that the scheduler side sends to the workers with each step; vLLM pickles it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

BlockIds: TypeAlias = tuple[list[int], ...]
"""By KV cache group."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One hand-over, as both sides name it."""

    id: str
    num_tokens: int
    """All of the prompt, or all but its last token, which decode computes to get its logits."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """Tokens of a prompt that are in prefill's cache after this step."""

    request: str
    transfer: Transfer
    tokens: tuple[int, int]
    new_blocks: BlockIds
    """They follow those of the chunks before; with the first token, a table begins anew."""


@dataclass(frozen=True, slots=True)
class Load:
    """A prompt that decode waits for."""

    request: str
    transfer: Transfer
    source: str
    num_held: int
    """Tokens that decode's prefix cache has."""
    blocks: BlockIds


@dataclass(frozen=True, slots=True)
class DeclinePrompt:
    """A prompt that decode does not want from a source."""

    transfer: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """A prompt that prefill will not compute."""

    request: str
    transfer: Transfer
    text: str


@dataclass(frozen=True, slots=True)
class Queue:
    """A prompt in vLLM's queue: new there, or the queue has moved since this was last said."""

    request: str
    transfer: Transfer
    source: str = ""
    """Where decode waits for it."""


@dataclass(slots=True)
class StepMetadata:
    """One step."""

    chunks: list[CachedChunk] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    declines: list[DeclinePrompt] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    queued: list[Queue] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks this step may write."""
    has_forward: bool = False
