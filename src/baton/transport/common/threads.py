"""The threads of a transport: workers with a queue, and a watcher of file descriptors."""

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
"""How often timers are called, while there are any."""


class WorkerThread:
    """A thread that runs queued actions in order."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], None]) -> None:
        self._queue.put(action)

    def close(self) -> None:
        """Runs what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            action()


class BlockingPool:
    """Threads for actions that block, one for each at a time.

    Idle threads are kept: starting a thread in Python blocks the caller until the thread runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[WorkerThread] = []

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def put(self, action: Callable[[], None]) -> None:
        """Runs an action on a thread of its own; if it raises, that thread ends."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = WorkerThread(self._name)
        worker.put(partial(self._run, worker, action))

    def forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._idle.clear()

    def _run(self, worker: WorkerThread, action: Callable[[], None]) -> None:
        action()
        self._idle.append(worker)


class Watcher:
    """One thread that waits for descriptors, posted actions and timers.

    All callbacks run on that thread. They must not block, and may be called spuriously.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: set[Callable[[], None]] = set()
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
        """Stops watching a descriptor, which must still be open."""
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def start_timer(self, callback: Callable[[], None]) -> None:
        """Calls back every tick until `stop_timer`."""
        if callback not in self._timers:
            self.post(partial(self._timers.add, callback))

    def stop_timer(self, callback: Callable[[], None]) -> None:
        """Stops a timer; to be called on the watcher's thread."""
        self._timers.discard(callback)

    def post(self, action: Callable[[], None]) -> None:
        """Runs an action on the thread, later."""
        self._actions.put(action)
        os.eventfd_write(self._wake, 1)

    def call(self, action: Callable[[], T]) -> T:
        """Runs an action on the thread and waits for its result."""
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
        """Runs what was posted, then ends the thread."""
        self._actions.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for fd, mask in self._epoll.poll(TICK_S if self._timers else None):
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
        if self._timers and now_s >= self._ticked_s + TICK_S:
            self._ticked_s = now_s
            for callback in list(self._timers):
                callback()


def has_events(fd: int, mask: int) -> bool:
    """Whether a descriptor has one of these events now."""
    poller = select.poll()
    poller.register(fd, mask)
    return bool(poller.poll(0))
