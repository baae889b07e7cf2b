"""What a request changes about the logits before a token is chosen.

In the order in which it is done: the bias is added; tokens that would end the answer are ruled out until
min_tokens are there; the repetition penalty divides positive and multiplies negative logits of tokens in
prompt or answer; presence and frequency penalties are subtracted for tokens of the answer.

Each change is one gather and one scatter for all rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.sampling.history import History, TokenCounts


def shape(logits: Tensor, histories: Sequence[History]) -> Tensor:
    """The logits as each row's request wants them; the same tensor where none wants anything."""
    biased = [(row, one) for row, one in enumerate(histories) if len(one.bias_ids)]
    barred = [
        (row, one) for row, one in enumerate(histories) if one.is_too_short_to_end and len(one.ending_ids)
    ]
    counted = [(row, one, one.counts) for row, one in enumerate(histories) if one.counts is not None]
    if not (biased or barred or counted):
        return logits
    shaped = logits.clone()
    if biased:
        at = _places(shaped, [(row, one.bias_ids) for row, one in biased])
        values = np.concatenate([one.bias_values for _, one in biased])
        shaped[at] = shaped[at] + _tensor(values, shaped)
    if barred:
        shaped[_places(shaped, [(row, one.ending_ids) for row, one in barred])] = -math.inf
    if counted:
        _penalise(shaped, counted)
    return shaped


def _penalise(shaped: Tensor, counted: list[tuple[int, History, TokenCounts]]) -> None:
    sizes = [len(counts.ids) for _, _, counts in counted]

    def spread(field: str) -> Tensor:
        values = np.array([getattr(one.params, field) for _, one, _ in counted], dtype=np.float32)
        return _tensor(np.repeat(values, sizes), shaped)

    at = _places(shaped, [(row, counts.ids) for row, _, counts in counted])
    times = _tensor(np.concatenate([counts.counts for _, _, counts in counted]), shaped)
    old = shaped[at]
    repetition = spread("repetition_penalty")
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - times * spread("frequency_penalty") - (times > 0) * spread("presence_penalty")
    shaped[at] = new


def _places(logits: Tensor, wanted: list[tuple[int, npt.NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Rows and ids as one flat index; no place comes twice."""
    rows = np.repeat([row for row, _ in wanted], [len(ids) for _, ids in wanted])
    ids = np.concatenate([ids for _, ids in wanted])
    return _tensor(rows, logits), _tensor(ids, logits)


def _tensor(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
