"""Which rows of a step are sampled from, and which tokens follow its rows, for the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.steps import Batch
from baton.errors import EngineError
from baton.protocol.outcomes import Aux

FORK = -1
"""Stands for the token of a row that is not computed but given."""
PROPOSAL, HIDDEN = "proposal", "hidden"
"""What an aux record calls a guess, and the row that it was made from (float32)."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What a draft guesses to follow an answer, and the model's normed row that it was made from."""

    token: int
    row: Tensor

    @property
    def hidden(self) -> bytes:
        """The row as bytes of float32."""
        return self.row.to("cpu", torch.float32).numpy().tobytes()


@dataclass(frozen=True, slots=True)
class Proposed:
    """What a draft guesses, by work that was sampled from, and the model's rows that it guessed from."""

    tokens: list[int]
    """Empty on ranks that do not see the whole vocabulary's logits."""
    rows: Tensor


def proposal_of(aux: Aux) -> int | None:
    """A source's guess, where it says one."""
    guess = aux.fields.get(PROPOSAL)
    return guess if isinstance(guess, int) else None


def hidden_of(aux: Aux) -> bytes | None:
    """The row that a source's first tokens were sampled from, where it says one."""
    return aux.tensors.get(HIDDEN)


def problem_of(aux: Aux, vocab_size: int, hidden_size: int) -> str:
    """What cannot be in a source's words about its draft; empty: nothing, and it may have said none."""
    guess, row = aux.fields.get(PROPOSAL, 0), hidden_of(aux)
    if type(guess) is not int or not 0 <= guess < vocab_size:
        return f"guessed {guess!r}, which is none of {vocab_size} tokens"
    if row is not None and len(row) != 4 * hidden_size:
        return f"sent a row of {len(row)} bytes, and the model's have {4 * hidden_size}"
    return ""


def sampled_rows(batch: Batch) -> NDArray[np.int64]:
    """Rows of the batch that tokens are sampled from: the last of each work, and those before guesses."""
    found: list[int] = []
    row = 0
    for work in batch.works:
        row += len(work.tokens)
        if work.num_samples:
            found += range(row - 1 - work.num_drafted, row)
    return np.array(found, dtype=np.int64)


def with_forks(batch: Batch) -> Batch:
    """The rows of a batch that a draft computes: where an answer forked also the one that it forked from."""
    if not any(work.hidden for work in batch.works):
        return batch
    works = [
        msgspec.structs.replace(work, start=work.start - 1, tokens=[FORK, *work.tokens])
        if work.hidden
        else work
        for work in batch.works
    ]
    return Batch(works)


def with_given(rows: Tensor, batch: Batch) -> Tensor:
    """The rows of a batch with those that works bring along before them."""
    parts: list[Tensor] = []
    row = 0
    for work in batch.works:
        if work.hidden:
            given = torch.frombuffer(bytearray(work.hidden), dtype=torch.float32)
            if len(given) != rows.shape[1]:
                raise EngineError(
                    f"sequence {work.sequence}: a row of {len(given)} channels, the model has {rows.shape[1]}"
                )
            parts.append(given[None].to(rows.device, rows.dtype))
        parts.append(rows[row : row + len(work.tokens)])
        row += len(work.tokens)
    return torch.cat(parts)


class Following:
    """The token that follows each row of a batch, given what was sampled."""

    def __init__(self, batch: Batch, sampled: Sequence[Sequence[int]]) -> None:
        said = iter(sampled)
        tokens: list[int] = []
        lasts: list[int] = []
        for work in batch.works:
            row = len(tokens)
            if not work.num_samples:
                if work.next_token is None:
                    raise EngineError(
                        f"sequence {work.sequence}: tokens from {work.start} on end inside the prompt, and "
                        "the next one is not told; a draft needs it"
                    )
                tokens += [*work.tokens[1:], work.next_token]
                continue
            known = len(work.tokens) - work.num_drafted
            found = next(said)
            # Rows of guesses that do not stand are computed anew later, whatever follows them now.
            tokens += [*work.tokens[1:known], *found, *[found[-1]] * (work.num_drafted + 1 - len(found))]
            lasts.append(row + known - 1 + len(found) - 1)
        self.tokens: NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        self.lasts: NDArray[np.int64] = np.array(lasts, dtype=np.int64)
        """Rows whose following token was sampled last: a guess is made from them."""
