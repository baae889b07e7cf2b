"""Draft tokens: the rows that are sampled from, the tokens that the draft layer sees, the aux record.

The draft layer takes the model's row of a position and the token that follows it, and predicts the token
after that one. For a further guess it runs again at the next position, from its own row and its own guess;
what that stores is computed anew once the tokens are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.errors import EngineError
from baton.protocol.outcomes import Aux

FORK = -1
"""Stands for the token of a row that is not computed but given."""
PROPOSALS, HIDDEN = "proposals", "hidden"
"""The names, in an aux record, of draft tokens (int32) and of the row that they follow from (float32)."""
FAILURE = "failure"
"""The name, in an aux record without tokens, of why none could be sampled in the requested format."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens to follow an answer, and the model's normed row that the first was predicted from."""

    tokens: list[int]
    row: Tensor

    @property
    def hidden(self) -> bytes:
        """The row as bytes of float32."""
        return self.row.to("cpu", torch.float32).numpy().tobytes()


def packed(tokens: Iterable[int]) -> bytes:
    """Draft tokens as they are in an aux record."""
    return np.array(list(tokens), dtype="<i4").tobytes()


def proposals_of(aux: Aux) -> list[int]:
    """The draft tokens of a source, as many as it sent."""
    tokens: list[int] = np.frombuffer(aux.tensors.get(PROPOSALS, b""), dtype="<i4").tolist()
    return tokens


def hidden_of(aux: Aux) -> bytes | None:
    """The row that a source's first tokens were sampled from, if it sent one."""
    return aux.tensors.get(HIDDEN)


def problem_of(aux: Aux, vocab_size: int, hidden_size: int) -> str:
    """Why a source's draft fields are invalid; empty if they are valid or missing."""
    row, num_bytes = hidden_of(aux), len(aux.tensors.get(PROPOSALS, b""))
    if num_bytes % 4:
        return f"sent draft tokens of {num_bytes} bytes; each has 4"
    for token in proposals_of(aux):
        if not 0 <= token < vocab_size:
            return f"sent the draft token {token}, which is none of {vocab_size} tokens"
    if row is not None and len(row) != 4 * hidden_size:
        return f"sent a row of {len(row)} bytes; the rows of the model have {4 * hidden_size}"
    return ""


def logits_rows(batch: ScheduledBatch) -> NDArray[np.int64]:
    """Rows of the batch whose logits are computed: those that prompt tokens are scored by, and those to
    sample from, which are the last of each sequence and those before its draft tokens."""
    rows: list[int] = []
    stop = 0
    for scheduled in batch.sequences:
        rows += range(stop, stop + len(scheduled.scored_tokens))
        stop += len(scheduled.tokens)
        if scheduled.num_samples:
            rows += range(stop - 1 - scheduled.num_drafted, stop)
    return np.array(rows, dtype=np.int64)


def with_forks(batch: ScheduledBatch) -> ScheduledBatch:
    """The rows that the draft computes: where an answer forked, also the row that it forked from."""
    if not any(scheduled.hidden for scheduled in batch.sequences):
        return batch
    return ScheduledBatch(
        [
            msgspec.structs.replace(scheduled, start=scheduled.start - 1, tokens=[FORK, *scheduled.tokens])
            if scheduled.hidden
            else scheduled
            for scheduled in batch.sequences
        ]
    )


def with_given_rows(rows: Tensor, batch: ScheduledBatch) -> Tensor:
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


def num_guesses_max(batches: Iterable[ScheduledBatch]) -> int:
    """The most draft tokens that are predicted for a sequence of these batches."""
    sequences = (scheduled for batch in batches for scheduled in batch.sequences)
    return max((scheduled.num_guesses for scheduled in sequences if scheduled.num_samples), default=0)


def guess_batch(
    batch: ScheduledBatch, depth: int, positions: Mapping[int, int], guesses: Mapping[int, Sequence[int]]
) -> ScheduledBatch:
    """One row for each sequence that is guessed further for: behind it follows its last guess.

    `positions`, by sequence, are those of the first of these rows; other dp groups are counted only.
    """
    return ScheduledBatch(
        [
            ScheduledSequence(
                scheduled.sequence,
                positions.get(scheduled.sequence, 0) + depth - 1,
                [*guesses.get(scheduled.sequence, (0,))[-1:]],
                scheduled.pages,
                scheduled.prompt_tokens,
            )
            for scheduled in batch.sequences
            if scheduled.num_samples and scheduled.num_guesses > depth
        ]
    )


class NextTokens:
    """The token that follows each row of a batch, given the sampled ones."""

    def __init__(self, batch: ScheduledBatch, sampled: Sequence[Sequence[int]]) -> None:
        sampled_by_sequence = iter(sampled)
        tokens: list[int] = []
        last_rows: list[int] = []
        self.positions: dict[int, int] = {}
        """By sequence: the position of the token that was sampled last."""
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
            last_row = num_known - 1 + len(accepted) - 1
            last_rows.append(row + last_row)
            self.positions[scheduled.sequence] = scheduled.start + last_row + 1
        self.tokens: NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        self.last_rows: NDArray[np.int64] = np.array(last_rows, dtype=np.int64)
        """Rows whose next token was sampled last: draft tokens are predicted from them."""
