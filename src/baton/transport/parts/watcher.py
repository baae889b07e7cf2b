"""One thread that sleeps until a descriptor has news, there is something to do, or time is up."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.05
"""How often clocks are called, while there are any."""


class Watcher:
    """Calls back on its own thread; a callback may be called in vain and must not block."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._clocks: set[Callable[[], None]] = set()
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._ticked_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Calls back with the events of a descriptor until `unwatch`."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, mask)

    def unwatch(self, fd: int) -> None:
        """Forgets a descriptor, which has to be open still."""
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def start_clock(self, callback: Callable[[], None]) -> None:
        """Calls back every tick until `stop_clock`."""
        if callback not in self._clocks:
            self.post(partial(self._clocks.add, callback))

    def stop_clock(self, callback: Callable[[], None]) -> None:
        """On the thread: ends the calls."""
        self._clocks.discard(callback)

    def post(self, action: Callable[[], None]) -> None:
        """Does something on the thread, some time."""
        self._actions.put(action)
        os.eventfd_write(self._wake, 1)

    def call(self, action: Callable[[], T]) -> T:
        """Does something on the thread and waits for its answer."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except OSError as error:
                future.set_exception(error)

        self.post(run)
        while not wait([future], timeout=1.0).done:
            assert self._thread.is_alive(), "the watcher crashed"
        return future.result()

    def close(self) -> None:
        """Does what was posted, then ends the thread."""
        self._actions.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for fd, mask in self._epoll.poll(TICK_S if self._clocks else None):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif callback := self._callbacks.get(fd):
                    callback(mask)
            while not self._actions.empty():
                action = self._actions.get()
                if action is None:
                    return
                action()
            self._tick()

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._clocks and now_s >= self._ticked_s + TICK_S:
            self._ticked_s = now_s
            for callback in list(self._clocks):
                callback()
