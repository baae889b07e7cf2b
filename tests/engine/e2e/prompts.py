"""Prompts, and what `transformers` answers to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.engine.e2e.instances import Heard
from tests.engine.tiny import oracle

PAGE = 16
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 300)
NUM_TOKENS = 64
_TOKENS = range(3, 97)
"""What every tiny vocabulary has, without the special ones."""


def prompt(num_tokens: int, seed: str = "") -> list[int]:
    """Random tokens; the same for the same arguments, and no prefix of another length's."""
    return random.Random(f"{num_tokens} {seed}").choices(_TOKENS, k=num_tokens)


def check_tokens(
    folder: Path, prompts: Sequence[Sequence[int]], found: Sequence[Heard], num_tokens: int = NUM_TOKENS
) -> None:
    """Every answer is what `transformers` generates, token by token."""
    wanted = oracle(folder, prompts, num_tokens)
    for asked, heard, answer in zip(prompts, found, wanted, strict=True):
        name = f"{folder.name}, prompt of {len(asked)} tokens"
        for index, got in enumerate(heard.tokens):
            assert got == answer, f"{name}, answer {index}: {difference(got, answer)}"
        assert heard.finishes == dict.fromkeys(heard.answers, "length"), f"{name}: {heard.finishes}"


def difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    """Where two answers part."""
    pairs = enumerate(zip(got, wanted, strict=False))
    where = next((index for index, (one, other) in pairs if one != other), min(len(got), len(wanted)))
    part = slice(where, where + 5)
    return f"token {where} of {len(wanted)}: {list(got[part])}, not {list(wanted[part])}"
