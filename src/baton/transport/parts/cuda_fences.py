"""A fence over a CUDA event, without importing torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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
        """Calls back now, or from a thread of this call's own."""
        if self.event.query():
            callback()
        else:
            threading.Thread(target=self._wait, args=(callback,), name="cuda-fence", daemon=True).start()

    def _wait(self, callback: Callable[[], None]) -> None:
        self.event.synchronize()
        callback()
