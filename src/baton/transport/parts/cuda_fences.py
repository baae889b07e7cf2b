"""A fence over a CUDA event, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.transport.parts.lanes import Waiters

_waiters = Waiters("cuda-fence")
os.register_at_fork(after_in_child=_waiters.forget)


class CudaEvent(Protocol):
    """What this needs of a torch.cuda.Event; made with blocking=True it costs no processor to wait for."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Waits for that with the GIL released."""


@dataclass(frozen=True, slots=True)
class CudaFence:
    """Ready when the stream that recorded the event has passed it.

    A transport that reads its source with a stream has that stream wait for `event`; any other one is called
    back, by a thread that sleeps in the event's own wait.
    """

    event: CudaEvent

    def is_ready(self) -> bool:
        """Whether the stream has passed the event."""
        return self.event.query()

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now, or from a thread that waits for nothing else."""
        if self.event.query():
            callback()
        else:
            _waiters.put(partial(self._wait, callback))

    def _wait(self, callback: Callable[[], None]) -> None:
        self.event.synchronize()
        callback()
