"""What a bound chunk consists of: pack at the source, copy between the two, unpack at the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from baton.plan.tokens import Ints

STAGING = "staging"
"""The buffer name of staging memory; a pair of ranks has one at each end, offsets counted from its lease."""

DIRECT, CONVERT, PACK = "direct", "convert", "pack"
"""How a pair of ranks moves a prompt; see `binding`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Source offsets, target offsets and lengths in bytes, ascending by source offset.

    Lengths are of the source's bytes; they differ from the target's only in an Unpack that changes the dtype.
    """

    source: Ints
    target: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans together."""
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class Pack:
    """At the source: gather spans of a buffer into staging."""

    source: int
    target: int
    component: str
    buffer: str
    spans: Spans


@dataclass(frozen=True, slots=True)
class Copy:
    """From a buffer of the source rank to a buffer of the target rank."""

    source: int
    target: int
    source_buffer: str
    target_buffer: str
    spans: Spans


@dataclass(frozen=True, slots=True)
class Unpack:
    """At the target: scatter staging into a buffer, changing the dtype on the way."""

    source: int
    target: int
    component: str
    buffer: str
    spans: Spans
    dtypes: tuple[str, str]


Step: TypeAlias = Pack | Copy | Unpack


def copy_lengths(steps: list[Step]) -> Ints:
    """The lengths of everything that crosses between ranks."""
    lengths = [step.spans.length for step in steps if isinstance(step, Copy)]
    return np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PackCost:
    """What posting a span and packing a byte cost on this pair of machines.

    The defaults are round figures for RDMA between GPUs; an endpoint measures its own.
    """

    span_s: float = 0.3e-6
    link_bytes_per_s: float = 50e9
    pack_bytes_per_s: float = 200e9
    pack_s: float = 20e-6

    def prefers_packing(self, num_spans: int, num_bytes: int) -> bool:
        """Whether the posting that the link cannot hide costs more than packing and unpacking."""
        exposed_s = num_spans * self.span_s - num_bytes / self.link_bytes_per_s
        return exposed_s > self.pack_s + 2 * num_bytes / self.pack_bytes_per_s


NEVER_PACK = PackCost(span_s=0.0)
ALWAYS_PACK = PackCost(span_s=1.0, pack_s=0.0)
