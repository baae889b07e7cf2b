"""Matrices, and how cut ones are loaded: inputs side by side in one, biases of a sum on one rank only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.seam import Share
from baton.engine.model.weights import Loader, Piece, columns, rows
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def laid_out(weight: Tensor) -> Tensor:
    """Matrices (..., outputs, inputs) in the memory order that this device multiplies quickest.

    On CPU in float32 that is inputs first: for 4 to 32 rows, a batch of decodes, it takes a tenth to a half
    less time, and for one row or hundreds as long.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.mT.contiguous().mT
    return weight


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs [span) of a matrix module with `size` of them."""

    name: str
    size: int
    span: Range
    has_bias: bool = False


def load_fused(loader: Loader, num_inputs: int, parts: Sequence[Outputs]) -> Linear:
    """One matrix that gives the outputs of all parts side by side."""
    pieces = [rows(f"{part.name}.weight", (part.size, num_inputs), part.span) for part in parts]
    weight = laid_out(loader.join(pieces))
    if not any(part.has_bias for part in parts):
        return Linear(weight)
    return Linear(weight, torch.cat([_bias(loader, part) for part in parts]))


def _bias(loader: Loader, part: Outputs) -> Tensor:
    """The bias of a part, zero where it has none beside parts that have one."""
    if not part.has_bias:
        size = part.span[1] - part.span[0]
        return torch.zeros(size, dtype=loader.cut.dtype, device=loader.cut.device)
    return loader.take(rows(f"{part.name}.bias", (part.size,), part.span))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs [span) of a matrix module of `shape`, a term of a sum over the shares of `share`."""

    name: str
    shape: tuple[int, int]
    span: Range
    share: Share
    has_bias: bool = False


def load_partial(loader: Loader, part: Inputs) -> Linear:
    """A matrix over some of the inputs; the first share adds the bias, so that it is added once."""
    weight = laid_out(loader.take(columns(f"{part.name}.weight", part.shape, part.span)))
    if not part.has_bias or part.share.index:
        return Linear(weight)
    return Linear(weight, loader.take(Piece(f"{part.name}.bias", part.shape[:1])))
