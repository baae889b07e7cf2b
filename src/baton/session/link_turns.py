"""Turns of the loop: everything that reaches a driver passes here, and what it sent leaves at the end.

A turn is what one wake-up of the loop brought. What drivers send during a turn leaves in one write per link
when the turn is over, and what they want done later is asked once. `TurnLoop` ends the turn before it goes to
sleep: a callback of its own would cost a second pass through asyncio with every wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("baton.session")


class Flushed(Protocol):
    """Something that keeps what is sent until the turn is over."""

    def flush(self) -> None:
        """Sends it."""


class TurnLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that calls `end_turn` in every pass, between the callbacks and the sleep."""

    def __init__(self, end_turn: Callable[[], None]) -> None:
        super().__init__(_BeforeSleep(self))
        self.end_turn = end_turn
        self.is_stirred = False
        """Whether something was asked for that must not wait for the end of the sleep."""

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Does something in the next pass."""
        self.is_stirred = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Does something at a time."""
        self.is_stirred = True
        return super().call_at(when, callback, *args, context=context)


class _BeforeSleep(selectors.DefaultSelector):
    """The selector of a loop; the pass in which the turn's end asked for more does not sleep."""

    def __init__(self, aio: TurnLoop) -> None:
        super().__init__()
        self._aio = aio

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Ends the turn, then sleeps."""
        self._aio.is_stirred = False
        self._aio.end_turn()
        return super().select(0 if self._aio.is_stirred else timeout)


class Turns:
    """Calls drivers, one at a time; the first failure of a call ends the instance."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.aio: asyncio.AbstractEventLoop | None = None
        """The running loop, until it is over."""
        self.after: list[Callable[[], None]] = []
        """What is done at the end of every turn."""
        self.stopped = asyncio.Event()
        self._on_end = on_end
        self._is_over = False
        self._posted: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._later: deque[Callable[[], None]] = deque()
        self._unsent: dict[Flushed, None] = {}
        self._is_begun = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def clock(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        assert self.aio is not None, "the loop does not run"
        return self.aio

    def open(self, aio: asyncio.AbstractEventLoop) -> None:
        """From now on turns happen; what was posted before is done first."""
        aio.set_exception_handler(self._escaped)
        self.aio = aio
        aio.call_soon(self._do_posted)
        self._is_begun = True

    def close(self) -> None:
        """No driver is called any more, and nothing that is posted is done."""
        self._is_over = True

    def post(self, action: Callable[[], None]) -> None:
        """From any thread: does something in a turn; after the end, nothing."""
        self._posted.append(action)
        if self.aio is not None and not self._is_woken and not self._is_over:
            self._is_woken = True
            # Raised if the loop closed since: then there is no turn any more, as after the end.
            with suppress(RuntimeError):
                self.aio.call_soon_threadsafe(self._do_posted)

    def later(self, action: Callable[[], None]) -> None:
        """Does something in this turn, after what is being done now."""
        self._later.append(action)
        self._is_begun = True

    def keep(self, link: Flushed) -> None:
        """The link has something to send when the turn is over."""
        self._unsent[link] = None
        self._is_begun = True

    def step(self, call: Callable[..., None], *arguments: object) -> None:
        """Calls a driver; whatever comes out of it is the end of the instance."""
        if self._is_over:
            return
        self._is_begun = True
        self._guard(call, *arguments)

    def spawn(self, work: Coroutine[Any, Any, T], then: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        """Does something beside the turns, and `then` in a turn unless it was cancelled."""
        task = self.clock.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, then))
        return task

    async def cancel_tasks(self) -> None:
        """Gives up everything that was spawned."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self, cause: str) -> None:
        """Sends what is queued, then tells the owner, once, that the instance is over."""
        if self._is_over:
            return
        self._is_over = True
        self.flush()
        self.stopped.set()
        self._on_end(cause)

    def die(self) -> None:
        """The loop is gone, with whatever was queued."""
        if not self._is_over:
            self._is_over = True
            self._on_end("the control loop died")

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:
            logger.exception("a step of the driver failed")
            self.end(f"a step of the driver failed: {type(error).__name__}: {error}")

    def _ended(self, then: Callable[[asyncio.Task[T]], None], task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self.step(then, task)

    def end_turn(self) -> None:
        """Does what was left for later, sends what is to be sent, and asks what drivers want next."""
        if not self._is_begun or self.aio is None:
            return
        while self._later:
            self.step(self._later.popleft())
        self._is_begun = False
        self._guard(self.flush)
        for action in self.after:
            if not self._is_over:
                self._guard(action)

    def flush(self) -> None:
        """Sends what was kept so far, because what comes next takes long."""
        while self._unsent:
            link = next(iter(self._unsent))
            del self._unsent[link]
            link.flush()

    def _do_posted(self) -> None:
        # What is posted meanwhile, by a step of this turn perhaps, needs no other wake-up. The mark is taken
        # away before the last look at the queue: who still sees it will be read.
        while self._posted:
            self._is_woken = True
            while self._posted:
                self.step(self._posted.popleft())
            self._is_woken = False
        self._is_woken = False

    def _escaped(self, aio: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """What no callback caught: trouble with a socket is the link's, anything else the instance's."""
        error = context.get("exception")
        message = str(context.get("message", ""))
        if error is None or isinstance(error, OSError):
            logger.warning("%s: %s", message, error)
            return
        assert isinstance(error, BaseException)
        logger.error("the control loop failed: %s", message, exc_info=error)
        self.end(f"the control loop failed: {type(error).__name__}: {error}")
