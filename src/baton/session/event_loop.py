"""The asyncio loop that calls drivers, and sends what they queued after each pass.

A pass is what one wake-up of the loop brings. Messages that drivers send during a pass leave in one write per
link at its end, and drivers are asked once when they want their next tick. `PassLoop` ends the pass before
the loop sleeps: a callback for that would cost a second run through asyncio with every wake-up.
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

from baton.errors import RemoteProtocolError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("baton.session")


class Flushable(Protocol):
    """Something that keeps what is sent until the pass is over."""

    def flush(self) -> None:
        """Sends it."""


class PassLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that calls `end_pass` in every pass, between the callbacks and the sleep."""

    def __init__(self, end_pass: Callable[[], None]) -> None:
        super().__init__(_EndPassSelector(self))
        self.end_pass = end_pass
        self.has_new_work = False
        """Whether a callback was scheduled that must not wait for the end of the sleep."""

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules a callback for the next pass."""
        self.has_new_work = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a callback for a time."""
        self.has_new_work = True
        return super().call_at(when, callback, *args, context=context)


class _EndPassSelector(selectors.DefaultSelector):
    """The selector of a loop; it does not sleep if the end of the pass scheduled more work."""

    def __init__(self, aio: PassLoop) -> None:
        super().__init__()
        self._aio = aio

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Ends the pass, then sleeps."""
        self._aio.has_new_work = False
        self._aio.end_pass()
        return super().select(0 if self._aio.has_new_work else timeout)


class EventLoop:
    """Calls drivers, one at a time; the first call that fails ends the instance."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.aio: asyncio.AbstractEventLoop | None = None
        """The running loop, until it is over."""
        self.after_pass: list[Callable[[], None]] = []
        """Called at the end of every pass."""
        self.stopped = asyncio.Event()
        self._on_end = on_end
        self._is_over = False
        self._posted: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._later: deque[Callable[[], None]] = deque()
        self._unsent: dict[Flushable, None] = {}
        self._is_begun = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def clock(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        assert self.aio is not None, "the loop does not run"
        return self.aio

    def open(self, aio: asyncio.AbstractEventLoop) -> None:
        """Begins; calls that were posted before come first."""
        aio.set_exception_handler(self._on_escaped)
        self.aio = aio
        aio.call_soon(self._run_posted)
        self._is_begun = True

    def close(self) -> None:
        """From now on no driver is called, and posted calls are dropped."""
        self._is_over = True

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: calls in a pass; after the end, does nothing."""
        self._posted.append(call)
        if self.aio is not None and not self._is_woken and not self._is_over:
            self._is_woken = True
            # Raised if the loop closed since: then there is no pass any more, as after the end.
            with suppress(RuntimeError):
                self.aio.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        # What is posted meanwhile, by a call of this pass perhaps, needs no other wake-up. The mark is reset
        # before the last look at the queue: a thread that still sees it has its call read.
        while self._posted:
            self._is_woken = True
            while self._posted:
                call = self._posted.popleft()
                if not self._is_over:
                    self._is_begun = True
                    try:
                        call()
                    except Exception as error:
                        self._fail(error)
            self._is_woken = False
        self._is_woken = False

    def step(
        self, call: Callable[..., None], *arguments: object, refuse: Callable[[str], None] | None = None
    ) -> None:
        """Calls a driver. A peer at fault is refused where possible; any other error ends the instance."""
        if self._is_over:
            return
        self._is_begun = True
        try:
            try:
                call(*arguments)
            except RemoteProtocolError as error:
                if refuse is None:
                    raise
                refuse(str(error))
        except Exception as error:
            self._fail(error)

    def later(self, call: Callable[[], None]) -> None:
        """Calls in this pass, after the current call."""
        self._later.append(call)
        self._is_begun = True

    def flush_later(self, link: Flushable) -> None:
        """The link has something to send at the end of the pass."""
        self._unsent[link] = None
        self._is_begun = True

    def spawn(self, work: Coroutine[Any, Any, T], then: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        """Runs a task beside the passes, and `then` in a pass unless it was cancelled."""
        task = self.clock.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_task_ended, then))
        return task

    def _on_task_ended(self, then: Callable[[asyncio.Task[T]], None], task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self.step(then, task)

    async def cancel_tasks(self) -> None:
        """Cancels everything that was spawned."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end_pass(self) -> None:
        """Runs what was left for later, sends what is queued, and asks what drivers want next."""
        if not self._is_begun or self.aio is None:
            return
        while self._later:
            self.step(self._later.popleft())
        self._is_begun = False
        try:
            self.flush()
            for call in self.after_pass:
                if not self._is_over:
                    call()
        except Exception as error:
            self._fail(error)

    def flush(self) -> None:
        """Sends what was queued so far; also called before something that takes long."""
        while self._unsent:
            link = next(iter(self._unsent))
            del self._unsent[link]
            link.flush()

    def end(self, cause: str) -> None:
        """Sends what is queued, then reports to the owner, once, that the instance is over."""
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

    def _fail(self, error: Exception) -> None:
        logger.error("a step of the driver failed", exc_info=error)
        self.end(f"a step of the driver failed: {type(error).__name__}: {error}")

    def _on_escaped(self, aio: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """What no callback caught: an error of a socket is the link's, any other is the instance's."""
        error = context.get("exception")
        message = str(context.get("message", ""))
        if error is None or isinstance(error, OSError):
            logger.warning("%s: %s", message, error)
            return
        assert isinstance(error, BaseException)
        logger.error("the control loop failed: %s", message, exc_info=error)
        self.end(f"the control loop failed: {type(error).__name__}: {error}")
