"""Fences: conditions that a batch waits for before it reads its source."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.transport.common.threads import BlockingPool


class ReadyFence:
    """A fence that is always ready."""

    def is_ready(self) -> bool:
        return True

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        callback()


NOW = ReadyFence()


class HostFence:
    """A fence that a thread of this process sets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Makes the fence ready and calls back everything that waits for it."""
        with self._lock:
            self._is_set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_ready(self) -> bool:
        return self._is_set

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now if set, else from the thread that sets it."""
        with self._lock:
            if not self._is_set:
                self._callbacks.append(callback)
                return
        callback()


class CudaEvent(Protocol):
    """The part of torch.cuda.Event that fences use; with blocking=True, waiting does not spin."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Waits for that with the GIL released."""


_event_waiters = BlockingPool("cuda-fence")
os.register_at_fork(after_in_child=_event_waiters.forget)


@dataclass(frozen=True, slots=True)
class CudaFence:
    """Ready when the stream that recorded the event has passed it.

    A transport that reads its source with a CUDA stream makes that stream wait for `event`. Other transports
    are called back by a thread that blocks in the event's own wait.
    """

    event: CudaEvent

    def is_ready(self) -> bool:
        return self.event.query()

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now, or from a thread that blocks in this event alone."""
        if self.event.query():
            callback()
        else:
            _event_waiters.put(partial(self._wait, callback))

    def _wait(self, callback: Callable[[], None]) -> None:
        self.event.synchronize()
        callback()
