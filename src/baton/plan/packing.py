"""Whether many small copies are worth gathering into one."""

from __future__ import annotations

from dataclasses import dataclass


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
