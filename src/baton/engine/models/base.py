"""The interface between models and the engine: what a pass offers to layers, and what a rank holds.

Theory. The runner owns the loop over layers and every collective; a model knows neither. A layer has two
halves, a mixer (over tokens) and an MLP (over channels). Each half returns a *partial* result, this rank's
share of a sum over ranks. The runner sums it over the ranks that share the work and passes the sum back, to
be added to the residual stream:

    x = layer.join_mix(x, sum over tp of layer.mix(x, attention))
    x = layer.join_feed(x, sum over dp and tp of layer.feed(x of all dp groups))

Rows are tokens of this rank's part of the batch, in the order of the step's sequences. A mixer reaches other
tokens only through `Attention`, which stores what the mixer caches and attends over it, whatever the
context-parallel scheme. A recurrent mixer provides a rule, from rows and states to results and states; the
pass finds the state of each sequence and the ranks that keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How heads attend: scale, and what some families add."""

    scale: float
    window: int | None = None
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


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Index queries of rows: each row attends to the `num_chosen` tokens with the highest scores.

    The score of a token is the sum, over index heads, of the weight times the product of query and key where
    that is above 0.
    """

    keys: Tensor
    """(rows, channels): what is cached."""
    queries: Tensor
    """(rows, heads, channels)."""
    weights: Tensor
    """(rows, heads), float32."""
    num_chosen: int


class Attention(Protocol):
    """One forward pass, as the mixers of a rank use it."""

    @property
    def positions(self) -> Tensor:
        """(rows,) int64: each row's position in its sequence."""

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: HeadOptions) -> Tensor:
        """Stores k and v, attends causally with q; all are (rows, heads of this rank, dim).

        The rank's query heads are grouped evenly over its kv heads. Returns (rows, q heads, v dim).
        """

    def latent(
        self,
        layer: int,
        query: LatentQuery,
        latent: Tensor,
        scale: float,
        chosen_by: IndexQuery | Literal["shared"] | None = None,
    ) -> Tensor:
        """Stores latent (rows, channels), attends causally; returns (rows, heads, value channels).

        With `chosen_by`, whose keys are stored too, a row attends only to what it chooses; with "shared" to
        what it chose at the last layer that had an index query.
        """

    def recur(self, layer: int, rows: Tensor, rule: Recurrence) -> Tensor:
        """Continues every sequence of the pass from its state, which is zero before its first token.

        Stores the states after it. `rows` is (rows, channels); returns the rule's result for each.
        """

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share a mixer's heads, for norms that reach across them."""


States: TypeAlias = Mapping[str, Tensor]
"""By component: (sequences, units, ...)."""


class Recurrence(Protocol):
    """The rule of a recurrent mixer: from rows and their sequences' states to results and new states."""

    @property
    def parts(self) -> Mapping[str, Sequence[Range]]:
        """By component: the units that each tp rank computes with; those that it keeps are among them."""

    def advance(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """From these states on with rows (sequences, tokens, channels): the results, and the states after."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of something cut `count` ways: part `index`."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a model that one rank holds."""

    layers: tuple[int, int]
    """Its pipeline stage; the first stage has the embedding, the last the head."""
    heads: Share
    """tp: heads, vocabulary."""
    width: Share
    """dp x tp: MLP width and experts."""
    dtype: torch.dtype
    device: torch.device
