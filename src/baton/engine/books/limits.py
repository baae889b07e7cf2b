"""How much at once, and what could never be."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from baton.engine.books.room import Room
from baton.engine.books.sequence import Role, Sequence
from baton.errors import ConfigError
from baton.plan.routes import TOKENS_MAX


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the steps of one dp group may hold."""

    chunk_tokens: int = 512
    """Tokens of one prompt that a step computes."""
    batch_tokens_max: int = 2048
    """Tokens of all sequences that a step computes."""
    sequences_max: int = 256
    """Sequences that are computed or received at once."""
    context_tokens_max: int = TOKENS_MAX
    """Prompt and answer together: the model's context."""
    chunks_in_flight: int = 1
    """Chunks of one prompt that may be in flight at once; more than one keeps pipeline stages busy."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")


def check_fit(room: Room, config: SchedulerConfig, sequence: Sequence) -> None:
    """Raises ConfigError on a sequence that could not end even if it were alone."""
    num_prompt, raw = sequence.num_prompt, sequence.asked.embeddings
    if num_prompt < 1:
        raise ConfigError("a prompt of no tokens; give at least one")
    if raw is not None and (not raw or len(raw) % (4 * num_prompt)):
        raise ConfigError(
            f"{len(raw)} bytes of input embeddings for {num_prompt} tokens; give float32 rows of equal length"
        )
    is_source = sequence.role is Role.SOURCE
    total = num_prompt if is_source else num_prompt + sequence.params.max_tokens
    what = f"a prompt of {num_prompt} tokens" + (
        "" if is_source else f" and {total - num_prompt} to generate"
    )
    if total > config.context_tokens_max:
        raise ConfigError(
            f"{what}: {total} tokens, the context has {config.context_tokens_max}; ask for fewer"
        )
    for group, pool in room.pools.items():
        need = _num_pages_most(room, config, group, sequence.num_tokens_max, num_prompt)
        if is_source:
            need = room.shares.num_pages(group, num_prompt, num_prompt)
        if need > pool.num_pages:
            remedy = f"at most {num_tokens_max(room, config, num_prompt)} tokens fit" if not is_source else ""
            raise ConfigError(
                f"{what} needs {need} pages of group {group!r}, the pool has {pool.num_pages}; "
                f"{remedy or 'shorten the prompt'}, or give the pool more pages"
            )


def num_tokens_max(room: Room, config: SchedulerConfig, prompt_tokens: int) -> int:
    """Prompt and answer together, at most, for a prompt of this length; less than it: it does not fit."""

    def is_over(total: int) -> bool:
        return any(
            _num_pages_most(room, config, group, total - 1, prompt_tokens) > pool.num_pages
            for group, pool in room.pools.items()
        )

    totals = range(1, config.context_tokens_max + 1)
    return bisect_right(totals, False, key=is_over)


def _num_pages_most(
    room: Room, config: SchedulerConfig, group: str, num_tokens: int, prompt_tokens: int
) -> int:
    step_tokens = config.chunk_tokens * config.chunks_in_flight
    return room.shares.num_pages_most(group, num_tokens, prompt_tokens, step_tokens)
