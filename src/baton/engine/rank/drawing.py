"""Tokens for the works of a step: one after another where guesses are there to be confirmed.

A guess stands if it is the very token that is sampled before it, whatever the request's wishes are: sampling
is a function of the logits, the seed and the position, so an answer is the same with guesses and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.sampler import Sampler, Want
from baton.engine.steps import Sampled, Work


def draw(sampler: Sampler, logits: torch.Tensor, works: Sequence[Work]) -> dict[int, list[Sampled]]:
    """By sequence: the tokens asked for or, behind guesses, as many as stand and one more.

    `logits` has the rows of `works` in order, for each the row of its last known token and of its guesses.
    """
    found: dict[int, list[Sampled]] = {}
    rows: dict[int, int] = {}
    num_rows = 0
    for work in works:
        rows[work.sequence] = num_rows
        num_rows += 1 + work.num_drafted
        sampler.extend(work.sequence, work.tokens[: len(work.tokens) - work.num_drafted], work.start)
    standing = list(works)
    for depth in range(1 + max((work.num_drafted for work in works), default=0)):
        wants = [
            Want(work.sequence, work.num_samples, work.start + len(work.tokens) - work.num_drafted + depth)
            for work in standing
        ]
        taken = [rows[work.sequence] + depth for work in standing]
        some = logits if taken == list(range(len(logits))) else logits[taken]
        for work, tokens in zip(standing, sampler.sample(some, wants), strict=True):
            found.setdefault(work.sequence, []).extend(tokens)
        standing = [work for work in standing if _stands(work, found[work.sequence], depth)]
        for work in standing:
            sampler.extend(work.sequence, [found[work.sequence][depth].token])
        if not standing:
            break
    return found


def _stands(work: Work, tokens: Sequence[Sampled], depth: int) -> bool:
    """Whether the guess after so many is the token that was sampled for its place."""
    if depth >= work.num_drafted:
        return False
    return tokens[depth].token == work.tokens[len(work.tokens) - work.num_drafted + depth]
