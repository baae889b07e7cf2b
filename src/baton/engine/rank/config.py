"""What a rank process is told at its start."""

from __future__ import annotations

import msgspec

from baton.engine.storage import engine_storage
from baton.plan import Cache, Spec, parse_layout
from baton.session import Timings
from baton.settings import Tls


class RankConfig(msgspec.Struct, frozen=True):
    """Who a rank is, what it runs and how it hands over; the same for all ranks but for `rank`."""

    instance: str
    model: str
    layout: str
    rank: int
    role: str
    secret: bytes
    rendezvous: str
    """A path that all ranks of the instance meet at, for torch.distributed."""
    num_pages: dict[str, int]
    page_tokens: int = 16
    dtype: str = "fp32"
    device: str = "cpu"
    num_threads: int = 1
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    """The speed of a simulated link to each rank; 0: as fast as the transport is."""
    policy: str = "cost"
    host: str = "127.0.0.1"
    port: int = 0
    """Of the coordinator, which the first rank hosts."""
    tls: Tls | None = None
    url: str = ""
    registry: str | None = None
    embed_registry: int | None = None
    staging_bytes: int = 0
    silence_s: float = Timings().silence_s
    has_draft: bool = False
    """Whether the model's draft layer runs and is handed over."""
    eos_ids: tuple[int, ...] = ()
    context_max: int = 0

    def spec(self, cache: Cache) -> Spec:
        """This side of every hand-over."""
        storage = engine_storage(cache, self.page_tokens, self.dtype).with_pages(self.num_pages)
        return Spec(parse_layout(self.layout), cache, storage)
