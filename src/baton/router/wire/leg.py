"""One request at one instance, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from baton.router.wire.reading import BadResponse, Head, ResponseReader

BUFFER_BYTES_MAX = 256 << 10
BODY_BYTES_MAX = 256 << 20


class Lost(Exception):  # noqa: N818  (an outcome, and not a mistake of this program)
    """No answer came, or not all of it; `code` is a cause that baton.web.problems knows."""

    def __init__(self, text: str, code: str = "PEER_LOST") -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class Line(Protocol):
    """What a leg needs of its connection."""

    def pause(self) -> None:
        """Reads no more for now."""

    def resume(self) -> None:
        """Reads on."""

    def finish(self, *, can_be_kept: bool) -> None:
        """The leg is over; a connection that cannot be kept is cut."""


class Leg:
    """Fed by its connection, read by one task; whoever ends it early wakes that task with the cause.

    What is not read is kept up to `keep_bytes_max` and dropped beyond; without that bound the connection
    is paused instead, so that a slow reader is felt at the other end.
    """

    def __init__(self, line: Line, keep_bytes_max: int | None = None) -> None:
        self.progress_s = monotonic()
        self.expires_s = float("inf")
        """When nobody is interested any more."""
        self.on_settled: Callable[[Leg], None] = _nothing
        """Called once, when the answer is whole or the leg has failed."""
        self.error: Lost | None = None
        self._line: Line | None = line
        self._reader = ResponseReader()
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._keep_bytes_max = keep_bytes_max
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    @property
    def head(self) -> Head | None:
        """Once it is there."""
        return self._reader.head

    @property
    def is_settled(self) -> bool:
        """Whether no more will come."""
        return self._line is None

    @property
    def is_waiting(self) -> bool:
        """Whether the other end is to blame for silence: all that came was read, and more is wanted."""
        return not self.is_settled and not self._is_paused and not self._pieces

    async def answered(self) -> Head:
        """Status and headers."""
        while (head := self._reader.head) is None:
            await self._more()
        return head

    async def read(self) -> bytes:
        """What has come of the body since, at least a byte; nothing at its end."""
        while not self._pieces:
            if self.error is not None:
                raise self.error
            if self._line is None:
                return b""
            await self._more()
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._num_bytes = 0
        if self._is_paused and self._line is not None:
            self._is_paused = False
            self.progress_s = monotonic()
            self._line.resume()
        return data

    async def whole(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """All of the body."""
        pieces, num_bytes = [], 0
        while piece := await self.read():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > bytes_max:
                raise Lost(f"the answer is longer than {bytes_max} bytes")
        return b"".join(pieces)

    def kept(self) -> bytes:
        """What has come of the body and was not read; for a leg that nobody reads."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> None:
        """Bytes from the connection."""
        self.progress_s = monotonic()
        try:
            body = self._reader.feed(data)
        except BadResponse as error:
            self.fail(Lost(str(error)))
            return
        if body:
            self._keep(body)
        if self._reader.is_complete:
            self._settle(can_be_kept=self._reader.can_be_kept)
        else:
            self._wake()

    def closed(self, text: str) -> None:
        """The connection is no more."""
        try:
            self._reader.end()
        except BadResponse as error:
            self.fail(Lost(text or str(error)))
        else:
            self._settle(can_be_kept=False)

    def fail(self, error: Lost) -> None:
        """Ends it at once, with a cause for whoever reads it."""
        if self._line is not None:
            self.error = error
            self._settle(can_be_kept=False)

    def close(self) -> None:
        """Ends it if it is not over: nobody wants it any more."""
        self.fail(Lost("nobody waits for it", "ABORTED"))

    def _keep(self, body: bytes) -> None:
        if self._keep_bytes_max is not None and self._num_bytes >= self._keep_bytes_max:
            return
        self._pieces.append(body)
        self._num_bytes += len(body)
        is_much = self._keep_bytes_max is None and self._num_bytes > BUFFER_BYTES_MAX
        if is_much and not self._is_paused and self._line is not None:
            self._is_paused = True
            self._line.pause()

    async def _more(self) -> None:
        if self.error is not None:
            raise self.error
        if self._line is None:
            raise Lost("the answer ended without a head")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _settle(self, *, can_be_kept: bool) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if self._is_paused:
            line.resume()
        line.finish(can_be_kept=can_be_kept)
        self._wake()
        self.on_settled(self)


def _nothing(leg: Leg) -> None:
    pass
