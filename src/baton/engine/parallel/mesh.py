"""Where a rank sits among the ranks of its instance, and the groups that it works in."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from baton.engine.models.base import Cut, Share
from baton.engine.parallel.collectives import Group, Pipe, guarded
from baton.plan.layout import Layout

TIMEOUT_S = 300.0
"""How long a rank waits in a collective for one that does not come."""


class Mesh:
    """One rank's view: its coordinates and its groups along tp, cp, dp and width (dp x tp)."""

    def __init__(
        self, layout: Layout, rank: int, *, is_hosted: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.at = layout.coordinates(rank)
        self._timeout = timedelta(seconds=timeout_s)
        self.tp = self._group(("tp",), is_hosted)
        self.cp = self._group(("cp",), is_hosted)
        self.dp = self._group(("dp",), is_hosted)
        self.width = self._group(("dp", "tp"), is_hosted) if self.dp.size > 1 else self.tp
        step, stage = layout.strides()["pp"], self.at["pp"]
        self.is_first = stage == 0
        self.is_last = stage == layout.size("pp") - 1
        self.pipe = Pipe(
            None if self.is_first else rank - step, None if self.is_last else rank + step, is_hosted=is_hosted
        )

    def cut(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> Cut:
        """What this rank holds of a model."""
        tp, dp = self.layout.size("tp"), self.layout.size("dp")
        return Cut(
            layers=self.layout.stages(num_layers, "engine")[self.at["pp"]],
            heads=Share(self.at["tp"], tp),
            width=Share(self.at["dp"] * tp + self.at["tp"], dp * tp),
            dtype=dtype,
            device=device,
        )

    def close(self) -> None:
        """Leaves the groups; what was handed on is waited for."""
        if self.layout.num_ranks == 1 or not dist.is_initialized():
            return
        try:
            self.pipe.drain()
        finally:
            dist.destroy_process_group()

    def _group(self, axes: tuple[str, ...], is_hosted: bool) -> Group:
        """This rank's group along `axes`; every rank goes through all groups, as torch asks for it."""
        found = Group((self.rank,), 0)
        for ranks in partition(self.layout, axes):
            if len(ranks) == 1:
                continue
            # Groups do not inherit the timeout of the meeting.
            handle = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                found = Group(ranks, ranks.index(self.rank), handle, is_hosted)
        return found


def partition(layout: Layout, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """The ranks in groups that differ along `axes` alone, each ascending."""
    named = set(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        key = tuple(at[name] for name in sorted(at) if name not in named)
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def connect(
    layout: Layout, rank: int, rendezvous: Path, device: torch.device, timeout_s: float = TIMEOUT_S
) -> Mesh:
    """Joins the ranks of an instance, which meet at a file that nobody has used before.

    Ranks with a GPU each meet over NCCL; ranks on a CPU, or several to a GPU, over gloo through host memory.
    """
    if layout.num_ranks == 1:
        return Mesh(layout, rank)
    has_own_device = device.type == "cuda" and torch.cuda.device_count() >= layout.num_ranks
    backend = "nccl" if has_own_device else "gloo"
    with guarded("the meeting", range(layout.num_ranks)):
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous.resolve()}",
            rank=rank,
            world_size=layout.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        return Mesh(layout, rank, is_hosted=backend == "gloo", timeout_s=timeout_s)
