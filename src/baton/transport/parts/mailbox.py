"""Events on their way to whoever polls, with a file descriptor to sleep on."""

from __future__ import annotations

import os
import threading

from baton.transport.base import Event


class Mailbox:
    """A list of events and an eventfd that is readable while the list is not empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True

    def put(self, event: Event) -> None:
        """Adds one event and wakes the sleeper."""
        with self._lock:
            self._events.append(event)
            if len(self._events) == 1 and self._is_open:
                os.eventfd_write(self._signal, 1)

    def take(self) -> list[Event]:
        """Everything that was put since the last call."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
            if events and self._is_open:
                os.eventfd_read(self._signal)
        return events

    def fileno(self) -> int:
        """The descriptor to sleep on."""
        return self._signal

    def close(self) -> None:
        """Gives the descriptor back; events can still be put and taken."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._signal)
