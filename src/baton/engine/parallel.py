"""The ranks of an instance: where each sits in the device mesh, and their collectives.

A collective that fails means that a rank of the instance has ended or hangs. It raises EngineError, and
nothing is recovered in place: the instance ends as a whole."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from baton.engine.models.base import Cut, Share
from baton.errors import EngineError
from baton.plan.layout import Layout

SENDS_MAX = 2
"""Tensors in flight to the next stage before a send waits: stages may work on different steps."""
TIMEOUT_S = 300.0
"""How long a rank waits in a collective for one that does not come."""


@contextmanager
def guarded(operation: str, ranks: Sequence[int]) -> Iterator[None]:
    """Turns the failure of a collective into EngineError."""
    try:
        yield
    except RuntimeError as error:
        peers = ", ".join(map(str, ranks))
        # The first sentence, without the place in the library's source.
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = re.sub(r"^\[[^\]]*\]\s*", "", first_line).split(". ")[0]
        raise EngineError(
            f"{operation} of ranks {peers} failed: {reason}; a rank has ended or hangs, restart the instance"
        ) from error


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that compute together, seen from one of them; collectives of a group of one do nothing."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    uses_host_memory: bool = False
    """Whether tensors have to lie in host memory to be exchanged."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; x may be overwritten."""
        if self.size == 1 or x.numel() == 0:
            return x
        with guarded("a sum", self.ranks):
            sent = self._sendable(x)
            dist.all_reduce(sent, group=self.handle)
            return sent.to(x.device, x.dtype)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks in the order of ranks; rank i has sizes[i] of them."""
        if self.size == 1:
            return x
        size_max = max(sizes)
        if size_max == 0:
            return x
        padded = x if len(x) == size_max else torch.cat((x, x.new_empty((size_max - len(x), *x.shape[1:]))))
        stacked = self.stack(padded)
        if min(sizes) == size_max:
            return stacked.flatten(0, 1)
        return torch.cat([stacked[i, :size] for i, size in enumerate(sizes)])

    def stack(self, x: Tensor) -> Tensor:
        """Equally shaped tensors of all ranks, under a new first dim."""
        if self.size == 1:
            return x.unsqueeze(0)
        with guarded("a gather", self.ranks):
            sent = self._sendable(x)
            gathered = sent.new_empty((self.size * sent.shape[0], *sent.shape[1:]))
            dist.all_gather_into_tensor(gathered, sent, group=self.handle)
            return gathered.to(x.device, x.dtype).view(self.size, *x.shape)

    def _sendable(self, x: Tensor) -> Tensor:
        if not self.uses_host_memory:
            return x.contiguous()
        # Sums of half floats would be rounded at every hop.
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        return x.to("cpu", dtype).contiguous()


class StageLink:
    """Sends and receives between neighbouring pipeline stages; sends run beside the compute."""

    def __init__(self, previous: int | None, following: int | None, *, uses_host_memory: bool) -> None:
        self.previous = previous
        self.following = following
        self._uses_host_memory = uses_host_memory
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Sends a tensor to the next stage, which has to know its shape and type."""
        if self.following is None or x.numel() == 0:
            return
        with guarded("a send to the next stage", (self.following,)):
            while len(self._in_flight) >= SENDS_MAX:
                self._in_flight.popleft()[0].wait()
            # A copy: the caller may overwrite x while it is in flight.
            sent = x.to("cpu", copy=True) if self._uses_host_memory else x.clone()
            work = dist.isend(sent.contiguous(), self.following)
            if work is not None:
                self._in_flight.append((work, sent))

    def receive(self, like: Tensor) -> Tensor:
        """Fills `like` from the previous stage."""
        if self.previous is None or like.numel() == 0:
            return like
        with guarded("a receive from the previous stage", (self.previous,)):
            received = torch.empty_like(like, device="cpu") if self._uses_host_memory else like
            dist.recv(received, self.previous)
            return received.to(like.device)

    def drain(self) -> None:
        """Waits until the next stage has received everything."""
        if self.following is None:
            return
        with guarded("a send to the next stage", (self.following,)):
            while self._in_flight:
                self._in_flight.popleft()[0].wait()


class Mesh:
    """One rank's view: its coordinates and its groups along tp, cp, dp and width (dp x tp)."""

    def __init__(
        self, layout: Layout, rank: int, *, uses_host_memory: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.at = layout.coordinates(rank)
        self._timeout = timedelta(seconds=timeout_s)
        self.tp = self._group(("tp",), uses_host_memory)
        self.cp = self._group(("cp",), uses_host_memory)
        self.dp = self._group(("dp",), uses_host_memory)
        self.width = self._group(("dp", "tp"), uses_host_memory) if self.dp.size > 1 else self.tp
        stride, stage = layout.strides()["pp"], self.at["pp"]
        self.is_first = stage == 0
        self.is_last = stage == layout.size("pp") - 1
        self.pipe = StageLink(
            None if self.is_first else rank - stride,
            None if self.is_last else rank + stride,
            uses_host_memory=uses_host_memory,
        )

    def cut(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> Cut:
        """What this rank holds of a model."""
        return cut_of(self.layout, self.rank, num_layers, dtype, device)

    def close(self) -> None:
        """Waits for sends to the next stage, and leaves the groups."""
        if self.layout.num_ranks == 1 or not dist.is_initialized():
            return
        try:
            self.pipe.drain()
        finally:
            dist.destroy_process_group()

    def _group(self, axes: tuple[str, ...], uses_host_memory: bool) -> RankGroup:
        """This rank's group along `axes`; torch asks every rank to create every group."""
        own = RankGroup((self.rank,), 0)
        for ranks in partition(self.layout, axes):
            if len(ranks) == 1:
                continue
            # New groups do not inherit the timeout of init_process_group.
            handle = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                own = RankGroup(ranks, ranks.index(self.rank), handle, uses_host_memory)
        return own


def cut_of(layout: Layout, rank: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> Cut:
    """What a rank holds of a model."""
    at, tp, dp = layout.coordinates(rank), layout.size("tp"), layout.size("dp")
    return Cut(
        layers=layout.stages(num_layers, "engine")[at["pp"]],
        heads=Share(at["tp"], tp),
        width=Share(at["dp"] * tp + at["tp"], dp * tp),
        dtype=dtype,
        device=device,
    )


def partition(layout: Layout, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """The ranks in groups that differ along `axes` alone, each ascending."""
    grouped_axes = set(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        key = tuple(at[axis] for axis in sorted(at) if axis not in grouped_axes)
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def connect(
    layout: Layout, rank: int, rendezvous: Path, device: torch.device, timeout_s: float = TIMEOUT_S
) -> Mesh:
    """Connects the ranks of an instance, through a rendezvous file that has not been used before.

    Ranks with a GPU each use NCCL; ranks on a CPU, or several to a GPU, use gloo through host memory.
    """
    if layout.num_ranks == 1:
        return Mesh(layout, rank)
    has_own_device = device.type == "cuda" and torch.cuda.device_count() >= layout.num_ranks
    backend = "nccl" if has_own_device else "gloo"
    with guarded("the rendezvous", range(layout.num_ranks)):
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous.absolute()}",
            rank=rank,
            world_size=layout.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        return Mesh(layout, rank, uses_host_memory=backend == "gloo", timeout_s=timeout_s)
