"""When an answer is over."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.engine.sampling.params import SamplingParams

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
    """Whether its text has come upon a stop string (baton.engine.text.answer)."""


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
