"""What ranks do together: sums, gathers, and handing rows on to the next stage.

A collective that fails means that a rank of the instance is gone or stuck. It ends as EngineError, and
nothing is recovered in place: the instance ends as a whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baton.errors import EngineError

SENDS_MAX = 2
"""Rows on their way to the next stage before a send waits: what lets stages work on unlike steps."""


@contextmanager
def guarded(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """Turns a collective's failure into EngineError."""
    try:
        yield
    except RuntimeError as error:
        peers = ", ".join(map(str, ranks))
        raise EngineError(
            f"{what} of ranks {peers} failed: {_reason(error)}; "
            "a rank has ended or hangs, restart the instance"
        ) from error


def _reason(error: RuntimeError) -> str:
    """The first sentence, without the place in the library's source."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", first).split(". ")[0]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that work together, seen from one of them; a group of one does nothing."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    is_hosted: bool = False
    """Whether tensors have to lie in host memory to be exchanged."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; x may be overwritten."""
        if self.size == 1 or x.numel() == 0:
            return x
        with guarded("a sum", self.ranks):
            sent = self._sendable(x)
            dist.all_reduce(sent, group=self.handle)
            return _like(sent, x)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks in the order of ranks; rank i has sizes[i] of them."""
        if self.size == 1:
            return x
        most = max(sizes)
        if most == 0:
            return x
        rows = x if len(x) == most else torch.cat((x, x.new_empty((most - len(x), *x.shape[1:]))))
        every = self.stack(rows)
        if min(sizes) == most:
            return every.flatten(0, 1)
        return torch.cat([every[i, :size] for i, size in enumerate(sizes)])

    def stack(self, x: Tensor) -> Tensor:
        """Equally shaped tensors of all ranks, under a new first dim."""
        if self.size == 1:
            return x.unsqueeze(0)
        with guarded("a gather", self.ranks):
            sent = self._sendable(x)
            every = sent.new_empty((self.size * sent.shape[0], *sent.shape[1:]))
            dist.all_gather_into_tensor(every, sent, group=self.handle)
            return _like(every, x).view(self.size, *x.shape)

    def _sendable(self, x: Tensor) -> Tensor:
        if not self.is_hosted:
            return x.contiguous()
        # Host memory only, and sums of half floats would be rounded at every hop.
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        return x.to("cpu", dtype).contiguous()


def _like(found: Tensor, x: Tensor) -> Tensor:
    return found.to(x.device, x.dtype)


class Pipe:
    """Rows on their way between neighbouring stages; sends run beside the computing."""

    def __init__(self, previous: int | None, following: int | None, *, is_hosted: bool) -> None:
        self.previous = previous
        self.following = following
        self._is_hosted = is_hosted
        self._underway: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Hands a tensor on; the receiver has to know its shape and type."""
        if self.following is None or x.numel() == 0:
            return
        with guarded("handing rows on", (self.following,)):
            while len(self._underway) >= SENDS_MAX:
                self._underway.popleft()[0].wait()
            # A copy: what was given may be overwritten while it is on its way.
            sent = x.to("cpu", copy=True) if self._is_hosted else x.clone()
            work = dist.isend(sent.contiguous(), self.following)
            if work is not None:
                self._underway.append((work, sent))

    def receive(self, like: Tensor) -> Tensor:
        """Fills `like` from the previous stage."""
        if self.previous is None or like.numel() == 0:
            return like
        with guarded("taking rows over", (self.previous,)):
            found = torch.empty_like(like, device="cpu") if self._is_hosted else like
            dist.recv(found, self.previous)
            return found.to(like.device)

    def drain(self) -> None:
        """Waits until everything handed on has been taken."""
        if self.following is None:
            return
        with guarded("handing rows on", (self.following,)):
            while self._underway:
                self._underway.popleft()[0].wait()
