"""Draft tokens: the rows that are sampled from, the tokens that the draft layer sees, the aux record.

The draft layer takes the model's row of a position and the token that follows it, and predicts the token
after that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.commands import Batch
from baton.errors import EngineError
from baton.protocol.outcomes import Aux

FORK = -1
"""Stands for the token of a row that is not computed but given."""
PROPOSAL, HIDDEN = "proposal", "hidden"
"""The names, in an aux record, of a draft token and of the row that it was predicted from (float32)."""
FAILURE = "failure"
"""The name, in an aux record without tokens, of why none could be sampled in the requested format."""


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token to follow an answer, and the model's normed row that it was predicted from."""

    token: int
    row: Tensor

    @property
    def hidden(self) -> bytes:
        """The row as bytes of float32."""
        return self.row.to("cpu", torch.float32).numpy().tobytes()


def proposal_of(aux: Aux) -> int | None:
    """The draft token of a source, if it sent one."""
    token = aux.fields.get(PROPOSAL)
    return token if isinstance(token, int) else None


def hidden_of(aux: Aux) -> bytes | None:
    """The row that a source's first tokens were sampled from, if it sent one."""
    return aux.tensors.get(HIDDEN)


def problem_of(aux: Aux, vocab_size: int, hidden_size: int) -> str:
    """Why a source's draft fields are invalid; empty if they are valid or missing."""
    token, row = aux.fields.get(PROPOSAL, 0), hidden_of(aux)
    if type(token) is not int or not 0 <= token < vocab_size:
        return f"sent the draft token {token!r}, which is none of {vocab_size} tokens"
    if row is not None and len(row) != 4 * hidden_size:
        return f"sent a row of {len(row)} bytes; the rows of the model have {4 * hidden_size}"
    return ""


def sampled_rows(batch: Batch) -> NDArray[np.int64]:
    """Rows of the batch to sample from: the last of each sequence, and those before its draft tokens."""
    rows: list[int] = []
    stop = 0
    for scheduled in batch.sequences:
        stop += len(scheduled.tokens)
        if scheduled.num_samples:
            rows += range(stop - 1 - scheduled.num_drafted, stop)
    return np.array(rows, dtype=np.int64)


def with_forks(batch: Batch) -> Batch:
    """The rows that the draft computes: where an answer forked, also the row that it forked from."""
    if not any(scheduled.hidden for scheduled in batch.sequences):
        return batch
    return Batch(
        [
            msgspec.structs.replace(scheduled, start=scheduled.start - 1, tokens=[FORK, *scheduled.tokens])
            if scheduled.hidden
            else scheduled
            for scheduled in batch.sequences
        ]
    )


def with_given_rows(rows: Tensor, batch: Batch) -> Tensor:
    """The rows of a batch, each sequence's given row (where it has one) before its own."""
    parts: list[Tensor] = []
    start = 0
    for scheduled in batch.sequences:
        if scheduled.hidden:
            given = torch.frombuffer(bytearray(scheduled.hidden), dtype=torch.float32)
            if len(given) != rows.shape[1]:
                raise EngineError(
                    f"sequence {scheduled.sequence}: a row of {len(given)} channels, "
                    f"the model has {rows.shape[1]}"
                )
            parts.append(given[None].to(rows.device, rows.dtype))
        parts.append(rows[start : start + len(scheduled.tokens)])
        start += len(scheduled.tokens)
    return torch.cat(parts)


class NextTokens:
    """The token that follows each row of a batch, given the sampled ones."""

    def __init__(self, batch: Batch, sampled: Sequence[Sequence[int]]) -> None:
        sampled_by_sequence = iter(sampled)
        tokens: list[int] = []
        last_rows: list[int] = []
        for scheduled in batch.sequences:
            row = len(tokens)
            if not scheduled.num_samples:
                if scheduled.next_token is None:
                    raise EngineError(
                        f"sequence {scheduled.sequence}: tokens from {scheduled.start} on end inside the "
                        "prompt without next_token; a draft needs it"
                    )
                tokens += [*scheduled.tokens[1:], scheduled.next_token]
                continue
            num_known = len(scheduled.tokens) - scheduled.num_drafted
            accepted = next(sampled_by_sequence)
            # Rows of rejected draft tokens are computed again later, whatever follows them now.
            padding = [accepted[-1]] * (scheduled.num_drafted + 1 - len(accepted))
            tokens += [*scheduled.tokens[1:num_known], *accepted, *padding]
            last_rows.append(row + num_known - 1 + len(accepted) - 1)
        self.tokens: NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        self.last_rows: NDArray[np.int64] = np.array(last_rows, dtype=np.int64)
        """Rows whose next token was sampled last: draft tokens are predicted from them."""
