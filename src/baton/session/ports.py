"""The interface between drivers and the world around them.

A driver is ordinary single-threaded code without a clock, a socket or a thread of its own. The production
loop (`baton.session.loop`) and the simulator (`baton.sim`) run the same drivers behind these two interfaces;
neither interprets the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.protocol.messages import Introduction, Message
from baton.protocol.outcomes import Cause


class Ports(Protocol):
    """Everything outside of a driver. No call blocks, and none calls the driver before it returns."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; differences alone mean something."""

    def token(self, num_bytes: int) -> bytes:
        """Unguessable bytes: grant ids and offsets."""

    def introduce_as(self, introduction: Introduction) -> None:
        """From now on this driver's links begin with this introduction."""

    def dial(self, address: str, instance: str) -> int:
        """Begins a session link; ends in `linked` or `lost` with the number answered here.

        With an empty name, any instance that proves the secret is accepted.
        """

    def send(self, link: int, message: Message) -> None:
        """Queues a message, in order; on a link that is gone it is dropped."""

    def hang_up(self, link: int) -> None:
        """Sends what is queued, then closes; no `lost` follows."""

    def run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        """Runs a job beside the driver, then calls `then` with its result or its exception."""

    def look_up(self, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Asks the registry for a coordinator's address; `then(address, "")` or `then(None, reason)`."""

    def post(self, call: Callable[[], None]) -> None:
        """Calls back on the driver's thread, soon; the one method that any thread may use."""

    def serving(self) -> None:
        """This rank is attached, or every rank of the instance is: it may be made known."""

    def end(self, cause: str) -> None:
        """The instance is over: the process ends with an error."""


class Driver(Protocol):
    """A driver as the world sees it; the world calls it from one thread only."""

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        """A link passed its handshake; introductions were exchanged."""

    def received(self, link: int, message: Message) -> None:
        """A message arrived."""

    def lost(self, link: int, cause: Cause) -> None:
        """A link is gone, or was never made, or refused; called once, not after `hang_up`."""

    def tick(self) -> None:
        """Time may have passed."""

    def next_tick(self) -> float | None:
        """When `tick` is wanted next, at the latest."""
