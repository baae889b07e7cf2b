"""Turns logits into tokens.

Order: bias, min_tokens, penalties (shaping.py); temperature, top-k, top-p, min-p, draw (choosing.py).
Temperature 0 takes the largest logit after shaping, the lowest id among equals. Randomness is a function of
seed, answer and position, and every row is computed by itself: neither the batch a row is in nor the instance
it is on can change its token.

Log-probabilities are those of the model itself, the log-softmax of the logits as they came, whatever the
request changes about them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.commands import SampledToken, StartSequence
from baton.engine.sampling.choosing import draw, likeliest, weigh
from baton.engine.sampling.history import History
from baton.engine.sampling.randomness import uniform
from baton.engine.sampling.shaping import shape
from baton.errors import EngineError

ROWS_AT_ONCE = 64
"""Rows that are weighed together: bounds the float64 copies of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class Want:
    """One row of logits: whose it is, how many tokens to take from it and where in the sequence they go."""

    sequence: int
    num_samples: int
    position: int


class Sampler:
    """Samples for the sequences of one dp group."""

    def __init__(self, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._histories: dict[int, History] = {}

    def begin(self, order: StartSequence) -> None:
        """Takes a sequence in; one that is known already (it was preempted, say) is replaced."""
        self._histories[order.sequence] = History(order, self._vocab_size, self._eos_ids)

    def extend(self, sequence: int, tokens: Sequence[int], start: int | None = None) -> None:
        """Takes in tokens from position `start` on (None: at the end), passing over those known already."""
        self._history(sequence).extend(tokens, start)

    def end(self, sequence: int) -> None:
        """Forgets a sequence, if it is known."""
        self._histories.pop(sequence, None)

    def sample(self, logits: Tensor, wants: Sequence[Want]) -> list[list[SampledToken]]:
        """Tokens for each row of logits (rows, vocabulary), as many as it wants.

        Where several are wanted, token i belongs to the i-th answer from the sequence's own on. Where
        `logprobs` is set a token has its own log-probability and, in `top`, those of the likeliest tokens,
        largest first, equal ones by the lower id, and its own last if it is not among them.
        """
        if logits.shape != (len(wants), self._vocab_size):
            raise EngineError(
                f"logits of shape {tuple(logits.shape)} for {len(wants)} rows and a vocabulary of "
                f"{self._vocab_size}; give one row per sequence, whole"
            )
        if not wants:
            return []
        histories = [self._placed(want) for want in wants]
        shaped = shape(logits, histories)
        best = shaped.max(dim=-1)
        _check_finite(best.values, wants)
        tokens = [
            [token] * want.num_samples for token, want in zip(best.indices.tolist(), wants, strict=True)
        ]
        is_drawn = [
            one.params.temperature > 0 and bool(had) for one, had in zip(histories, tokens, strict=True)
        ]
        for rows in _batches(is_drawn):
            drawn = _draw_rows(shaped[rows], [histories[row] for row in rows], [wants[row] for row in rows])
            for row, new in zip(rows, drawn, strict=True):
                tokens[row] = new
        return _told(logits, tokens, histories)

    def _history(self, sequence: int) -> History:
        history = self._histories.get(sequence)
        if history is None:
            raise EngineError(f"sequence {sequence} is unknown to the sampler; begin it first")
        return history

    def _placed(self, want: Want) -> History:
        """The history, which has to reach right up to the wanted token: else penalties would be wrong."""
        history = self._history(want.sequence)
        if history.num_tokens != want.position:
            raise EngineError(
                f"sequence {want.sequence}: a token for position {want.position} is wanted, but "
                f"{history.num_tokens} tokens are known; extend the sequence by what was computed"
            )
        return history


def _draw_rows(shaped: Tensor, histories: Sequence[History], wants: Sequence[Want]) -> list[list[int]]:
    num_draws = max(want.num_samples for want in wants)
    uniforms = torch.zeros(len(wants), num_draws, dtype=torch.float64)
    for row, (one, want) in enumerate(zip(histories, wants, strict=True)):
        for answer in range(want.num_samples):
            uniforms[row, answer] = uniform(one.params.seed, one.index + answer, want.position)
    weights = weigh(shaped, [one.params for one in histories])
    drawn: list[list[int]] = draw(weights, uniforms.to(shaped.device)).tolist()
    return [some[: want.num_samples] for some, want in zip(drawn, wants, strict=True)]


def _told(
    logits: Tensor, tokens: Sequence[Sequence[int]], histories: Sequence[History]
) -> list[list[SampledToken]]:
    """The tokens with the log-probabilities that were asked for."""
    told = [[SampledToken(token) for token in some] for some in tokens]
    counts = [-1 if one.params.logprobs is None else one.params.logprobs for one in histories]
    is_asked = [count >= 0 and bool(some) for count, some in zip(counts, tokens, strict=True)]
    for rows in _batches(is_asked):
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        values, ids = likeliest(logprobs, min(max(1, *(counts[row] for row in rows)), logprobs.shape[-1]))
        width = max(len(tokens[row]) for row in rows)
        padded = [[*tokens[row], *[0] * (width - len(tokens[row]))] for row in rows]
        own = logprobs.gather(-1, torch.tensor(padded, device=logits.device)).tolist()
        for row, its_ids, its_values, its_own in zip(rows, ids.tolist(), values.tolist(), own, strict=True):
            top = dict(zip(its_ids[: counts[row]], its_values[: counts[row]], strict=True))
            told[row] = [
                SampledToken(token, value, {**top, token: value})
                for token, value in zip(tokens[row], its_own[: len(tokens[row])], strict=True)
            ]
    return told


def _check_finite(best: Tensor, wants: Sequence[Want]) -> None:
    """The maximum of a row is NaN if anything in it is, so it shows what no token can be chosen from."""
    if not best.isfinite().all():
        broken = best.isfinite().logical_not().nonzero().flatten().tolist()
        sequences = sorted(wants[row].sequence for row in broken)
        raise EngineError(
            f"logits of sequences {sequences} have no finite maximum; check the weights and the dtype"
        )


def _batches(is_chosen: Sequence[bool]) -> Iterator[list[int]]:
    rows = [row for row, is_one in enumerate(is_chosen) if is_one]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[first : first + ROWS_AT_ONCE]
