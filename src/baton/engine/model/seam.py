"""Where a model meets the engine: what a layer is, and what it may ask of a pass.

Theory. The runner owns the loop over layers and every collective; a model knows neither. A layer has two
halves, a mixer (over tokens) and an MLP (over channels). Each half gives a *partial* result, this rank's
share of a sum over ranks; the runner sums it over the ranks that share the work and gives the sum back to be
joined to the residual stream:

    x = layer.join_mix(x, sum over tp of layer.mix(x, attention))
    x = layer.join_feed(x, sum over dp and tp of layer.feed(x of all dp groups))

Rows are tokens of this rank's part of the batch, in the order of the step's works. A mixer's only way to
other tokens is `Attention`, which stores what the mixer caches and attends over it, whatever the
context-parallel scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How heads attend: scale, and what some families add."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """One learned logit per query head of this rank that takes part in the softmax and has no value."""


class LatentQuery(Protocol):
    """The queries of a latent mixer, in whichever of two forms is cheaper for the pass."""

    def absorbed(self) -> Tensor:
        """(rows, heads, latent channels): attends to the cached latent itself, one key for all heads."""

    def plain(self) -> Tensor:
        """(rows, heads, key channels): attends to expanded keys."""

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, latent channels) -> keys and values, each (tokens, heads, channels of its own)."""

    def project(self, mixed: Tensor) -> Tensor:
        """Absorbed results (rows, heads, value part of the latent) -> (rows, heads, value channels)."""

    @property
    def num_value_channels(self) -> int:
        """How many of the latent's first channels are the value part."""


class Attention(Protocol):
    """One pass, as the mixers of a rank see it."""

    @property
    def positions(self) -> Tensor:
        """(rows,) int64: each row's position in its sequence."""

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: HeadOptions) -> Tensor:
        """Stores k and v, attends causally with q; all are (rows, heads of this rank, dim).

        The rank's query heads are grouped evenly over its kv heads. The answer is (rows, q heads, v dim).
        """

    def latent(self, layer: int, query: LatentQuery, latent: Tensor, scale: float) -> Tensor:
        """Stores latent (rows, channels), attends causally: the answer is (rows, heads, value channels)."""

    def state(self, layer: int, component: str) -> Tensor:
        """A recurrent component's pool at a layer, (slots, units of this rank, ...), to read and write."""

    @property
    def sequences(self) -> Sequence[Stretch]:
        """The sequences of the pass, in the order of their rows; for recurrent mixers."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [first, last) are one sequence from position `start` on; its recurrent state is in `slot`."""

    first: int
    last: int
    start: int
    slot: int


class Layer(Protocol):
    """One layer on one rank."""

    index: int
    """Global layer id."""

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the mixer's output for the residual stream x (rows, hidden)."""

    def join_mix(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the mixer, given the summed output."""

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the MLP's output."""

    def join_feed(self, x: Tensor, fed: Tensor) -> Tensor:
        """The residual stream after the MLP, given the summed output."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of something cut `count` ways: part `index`."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank holds of a model."""

    layers: tuple[int, int]
    """Its pipeline stage; the first stage has the embedding, the last the head."""
    heads: Share
    """tp: heads, vocabulary."""
    width: Share
    """dp x tp: MLP width and experts."""
    dtype: torch.dtype
    device: torch.device


class Embedding(Protocol):
    """Token ids to rows; cut by vocabulary over tp, so the result is a partial sum."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(rows,) -> partial (rows, hidden): zero for ids of other ranks."""

    def scale(self, x: Tensor) -> Tensor:
        """What the family does to the summed embedding before the first layer."""


class Head(Protocol):
    """The last norm and this rank's slice of the vocabulary."""

    def logits(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, vocabulary of this rank), float32; ranks in order make up the whole."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank runs."""

    layers: tuple[Layer, ...]
    embedding: Embedding | None
    head: Head | None
