"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    model: str
    dtype: str = "fp32"
    device: str = "cpu"
    num_threads: int = 1
    num_prompt: int = 512
    """Tokens of the prompt that is prefilled."""
    num_decoded: int = 64
    """Tokens that every request is answered with."""
    num_requests: int = 8
    """Decoded at once, against one in `transformers`."""
    repeats: int = 5
