"""A fence that the simulated device sets."""

from __future__ import annotations

from collections.abc import Callable


class SimFence:
    """Not ready until its moment in virtual time."""

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """The device is done."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_ready(self) -> bool:
        """Whether the device is done."""
        return self._is_set

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now, or when the device is done."""
        if self._is_set:
            callback()
        else:
            self._callbacks.append(callback)
