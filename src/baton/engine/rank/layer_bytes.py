"""How many bytes each layer of a rank has to hand over: states and windows make them unlike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.plan import Spec
from baton.plan.cache import Extent
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import box
from baton.plan.ranges import Range, overlap, to_ids
from baton.plan.tokens import Ints


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """By component: its extent, and what one entry takes on each layer of a rank."""

    entries: tuple[tuple[Extent, Ints], ...]
    kinds: tuple[int, ...]
    """A number for each layer, the same for layers that keep the same."""

    @classmethod
    def of_rank(cls, spec: Spec, rank: int, layers: Range) -> LayerBytes:
        """Of the layers [layers) that a rank computes."""
        found = []
        for component in spec.cache.components:
            held = box(spec, component, rank, "this")
            num_units = held.units[1] - held.units[0]
            size = num_units * component.num_elements * item_bytes(spec.storage.dtype_of(component))
            each = np.zeros(layers[1] - layers[0], dtype=np.int64)
            each[[layer - layers[0] for layer in to_ids(held.layers) if layer < layers[1]]] = size
            found.append((component.extent, each))
        numbers: dict[tuple[int, ...], int] = {}
        kept = zip(*(each.tolist() for _, each in found), strict=True)
        return cls(tuple(found), tuple(numbers.setdefault(each, len(numbers)) for each in kept))

    @property
    def num_layers(self) -> int:
        """How many layers the rank computes."""
        return len(self.kinds)

    @property
    def is_alike(self) -> bool:
        """Whether all layers keep the same."""
        return max(self.kinds, default=0) == 0

    def of_tokens(self, num_tokens: int, tokens: Range) -> Ints:
        """Of some tokens of a prompt, by layer: a state goes with the last of them."""
        total = np.zeros(self.num_layers, dtype=np.int64)
        for extent, each in self.entries:
            if extent.has_tokens:
                first, last = overlap(extent.wanted(num_tokens, 0), tokens) or (0, 0)
                total += each * (last - first)
            elif tokens[1] >= num_tokens:
                total += each
        return total

    def of_states(self, num_tokens: int, tokens: Range) -> Ints:
        """How much of that is recurrent state."""
        total = np.zeros(self.num_layers, dtype=np.int64)
        for extent, each in self.entries:
            if not extent.has_tokens and tokens[1] >= num_tokens:
                total += each
        return total
