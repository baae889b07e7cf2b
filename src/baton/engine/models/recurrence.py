"""What recurrent mixers share: chunks that are computed at once, the convolution, and the cut over tp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.base import States
from baton.engine.models.mlp import ACTIVATIONS
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    covering,
    cut_mirrored,
    cut_units,
    load_partial,
    rows,
    scaled,
)
from baton.plan.kinds import Recurrent
from baton.plan.ranges import Range

CHUNK = 64
"""A longer one needs more products among its own tokens, a shorter one more of them with the state."""
LOG_LEAST = -60.0
"""Of a decay: beyond it numbers become so small that processors take many times as long over them."""


def chunks(num_tokens: int) -> Iterator[slice]:
    """Where each chunk lies."""
    for first in range(0, num_tokens, CHUNK):
        yield slice(first, first + CHUNK)


def by_unit(x: Tensor, chunk: slice) -> Tensor:
    """A chunk of (n, tokens, units, channels) as (n, units, tokens, channels)."""
    return x[:, chunk].transpose(1, 2)


def reach(log_decay: Tensor) -> Tensor:
    """Logarithms of decays (..., chunk, 1) summed up to each token.

    In float64: after a token that forgets everything, sums must still resolve a mild decay.
    """
    return log_decay.to(torch.float64).cumsum(-2)


def reaches(log_decay: Tensor) -> Tensor:
    """The same for (..., tokens, 1), chunk by chunk: (..., chunks, CHUNK, 1); the last chunk is filled up."""
    filled = functional.pad(log_decay, (0, 0, 0, -log_decay.shape[-2] % CHUNK))
    return reach(torch.unflatten(filled, -2, (-1, CHUNK)))


def decay(log: Tensor) -> Tensor:
    """From logarithms of at most 0, in float32; tiny results stay normal numbers."""
    return log.clamp_min(LOG_LEAST).to(torch.float32).exp_()


def fading(reached: Tensor) -> Tensor:
    """From summed logarithms (..., chunk, 1): what is left at t of what came at s, 0 for s > t."""
    shape = (*reached.shape[:-1], reached.shape[-2])
    between = torch.empty(shape, dtype=torch.float32, device=reached.device)
    # Subtracted as they are, and rounded afterwards.
    torch.sub(reached, reached.mT, out=between)
    return between.clamp_(LOG_LEAST, 0.0).exp_().tril_()


# The short causal convolution before a recurrence: each channel by itself, over the last few tokens.


@dataclass(frozen=True, slots=True)
class Convolution:
    """Weights (channels, taps + 1), the last for the token itself."""

    weight: Tensor
    bias: Tensor | None
    activation: str

    def advance(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x (n, tokens, channels) after the inputs (n, channels, taps): the outputs, and the last inputs."""
        num_tokens, num_taps = x.shape[1], before.shape[-1]
        inputs = torch.cat((before.mT.to(x.dtype), x), dim=1)
        out = inputs[:, num_taps:] * self.weight[:, num_taps]
        for tap in range(num_taps):
            out.addcmul_(inputs[:, tap : tap + num_tokens], self.weight[:, tap])
        if self.bias is not None:
            out.add_(self.bias)
        return ACTIVATIONS[self.activation](out), inputs[:, num_tokens:].mT


# The units of a layer that a rank computes with, by what the layer caches.


@dataclass(frozen=True, slots=True)
class RecurrentUnits:
    """The heads of this rank, the groups of heads that it needs, and the convolution over both.

    tp cuts heads and groups each by itself, so that where sizes do not divide a rank computes the groups of
    its heads and those that it keeps the convolution's state of.
    """

    kind: Recurrent
    tp_rank: int
    parts: Mapping[str, tuple[Range, ...]]
    """By component: the units that each tp rank computes with."""
    convolution: Convolution

    @classmethod
    def load(
        cls, loader: Loader, kind: Recurrent, name: str, activation: str, has_bias: bool = False
    ) -> RecurrentUnits:
        """`name` is that of the convolution, whose channels are those of the parts one after the other."""
        share = loader.cut.heads
        parts = {"ssm": cut_units(kind.heads, kind.unit, share)}
        spans, num_channels = [], 0
        for conv in kind.convs:
            kept = cut_units(conv.units.count, conv.units.name, share)
            units = covering(parts["ssm"], kept, kind.heads // conv.units.count)
            first, last = scaled(units[share.index], conv.channels)
            spans.append((num_channels + first, num_channels + last))
            num_channels += conv.units.count * conv.channels
            parts[f"conv.{conv.part}"] = units
        shape = (num_channels, 1, kind.convs[0].taps + 1)
        weight = loader.join([rows(f"{name}.weight", shape, span) for span in spans]).squeeze(1)
        bias = loader.join([rows(f"{name}.bias", shape[:1], span) for span in spans]) if has_bias else None
        return cls(kind, share.index, parts, Convolution(weight, bias, activation))

    def own(self, part: str) -> Range:
        """The units of a component that this rank computes with."""
        return self.parts[part][self.tp_rank]

    @property
    def heads(self) -> Range:
        return self.own("ssm")

    @property
    def num_heads(self) -> int:
        first, last = self.heads
        return last - first

    def group_of_head(self, part: str, device: torch.device) -> Tensor:
        """For each of this rank's heads: which of its units of a part it belongs to."""
        num_units = next(conv.units.count for conv in self.kind.convs if f"conv.{conv.part}" == part)
        return torch.arange(*self.heads, device=device) // (self.kind.heads // num_units) - self.own(part)[0]

    def by_head(self, loader: Loader, name: str) -> Tensor:
        """This rank's part of a tensor with one number for each head, in float32."""
        return loader.take(rows(name, (self.kind.heads,), self.heads), torch.float32)

    def load_output(
        self, loader: Loader, name: str, sizes: tuple[int, int], has_bias: bool = False
    ) -> tuple[slice, Linear]:
        """The last matrix for heads of so many channels, by (hidden size, channels).

        Also which channels of its heads this rank adds to the output; other mirrors add the others.
        """
        (hidden_size, head_dim), first = sizes, self.heads[0]
        added = cut_mirrored(self.parts["ssm"], head_dim, loader.cut.heads)
        shape = (hidden_size, self.kind.heads * head_dim)
        output = load_partial(loader, InputSlice(name, shape, added, loader.cut.heads, has_bias))
        return slice(added[0] - first * head_dim, added[1] - first * head_dim), output

    def convolve(self, x: Tensor, states: States) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Each part as (n, tokens, units, channels) in float32, and the states of the convolution after."""
        names = [part for part in self.parts if part != "ssm"]
        before = torch.cat([states[name].flatten(1, 2) for name in names], dim=1)
        mixed, after = self.convolution.advance(x, before)
        counts = [last - first for first, last in map(self.own, names)]
        sizes = [count * conv.channels for count, conv in zip(counts, self.kind.convs, strict=True)]
        outs = torch.split_with_sizes(mixed.float(), sizes, -1)
        kept = zip(names, counts, torch.split_with_sizes(after, sizes, 1), strict=True)
        return (
            [torch.unflatten(out, -1, (count, -1)) for out, count in zip(outs, counts, strict=True)],
            {name: torch.unflatten(tensor, 1, (count, -1)) for name, count, tensor in kept},
        )
