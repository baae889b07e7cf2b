"""An instance of a model: worker processes, and a thread that runs the engine core.

The thread owns all state that changes. Callers reach it through a queue of calls, and it calls their event
sinks. When a worker ends, the whole instance ends: every request fails with the reason.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, Self

from baton.checkpoint.tokenizer import eos_ids, load_tokenizer
from baton.engine.config import EngineConfig, EngineSizes, WorkerConfig
from baton.engine.core import EngineCore
from baton.engine.executor import Executor
from baton.engine.load import SNAPSHOT_S, EngineLoad
from baton.engine.requests import EngineRequest, ModelContext, RequestError, RequestEvent, RequestFinished
from baton.engine.sampling_params import SamplingParams, sampling_defaults
from baton.engine.sizes import derive_sizes, find_device
from baton.engine.tokenizer import Tokenizer
from baton.errors import EngineError

IDLE_S = 0.5
"""How often an idle thread checks deadlines."""
CLOSED = "it was closed"
WARM_UP_TOKENS = 64
WARM_UP_S_MAX = 120.0


class CallQueue:
    """Calls from other threads to one that sleeps in `multiprocessing.connection.wait`."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Readable while there are calls."""
        return self._reader

    def post(self, call: Callable[[], None]) -> None:
        """Has the reader make a call; any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Wakes the reader; a full pipe has woken it already."""
        with self._lock, suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """For the reader: consumes the wake-ups."""
        os.read(self._reader, 4096)

    def run(self) -> None:
        """For the reader: makes the calls."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)


class Instance:
    """A model that runs in one layout."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes | None = None) -> None:
        self.config = config = replace(config, device=find_device(config.device))
        self.sizes = sizes or derive_sizes(config)
        self.secret = config.secret or secrets.token_bytes(32)
        backend = load_tokenizer(self.sizes.checkpoint)
        self.tokenizer = Tokenizer(backend) if backend is not None else None
        self.eos_ids = frozenset(eos_ids(self.sizes.checkpoint, backend))
        stated = self.sizes.checkpoint.generation_config if config.generation_config == "auto" else {}
        self.sampling_defaults = sampling_defaults(stated, self.sizes.architecture.vocab_size)
        self.failure = ""
        """Why the instance ended, once it has."""
        self._executor = Executor()
        self._calls = CallQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards the two below."""
        self._end_callbacks: list[Callable[[], None]] = []
        self._has_ended = False
        architecture = self.sizes.architecture
        model = ModelContext(
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            vocab_size=architecture.vocab_size,
            hidden_size=architecture.hidden_size,
            context_max=self.sizes.context_max,
        )
        self.core = EngineCore(config, self.sizes, model, self._executor.send, self._calls.post)

    @property
    def address(self) -> str:
        """The coordinator's host:port, where other instances ask for hand-overs."""
        return self._executor.up.coordinator

    @property
    def epoch(self) -> int:
        """Grows with each start of the instance; 0 before it is up."""
        return self._executor.up.epoch

    @property
    def is_running(self) -> bool:
        return self._thread is not None and not self.failure

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {worker.rank: worker.process.pid for worker in self._executor.workers}

    def start(self, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Starts the workers and waits until all are up; call it from a thread that lives as long as they."""
        with ExitStack() as unless_up:
            unless_up.callback(self.close)
            engine = replace(
                self.config,
                model=self.sizes.model,
                secret=self.secret,
                num_threads=self.sizes.num_threads,
                pool_tokens=self.sizes.pool_tokens,
            )
            tokenizer = self.tokenizer.serialize() if self.tokenizer is not None else ""
            config = WorkerConfig(engine, tuple(sorted(self.eos_ids)), tokenizer)
            self._executor.start(config, self.sizes.layout.num_ranks, progress)
            self._thread = threading.Thread(target=self._run, name=f"baton {self.config.name}", daemon=True)
            self.core.set_running()
            self._thread.start()
            if self.config.is_warmed:
                self._warm_up()
            self.core.queue_s_max = self.config.queue_s_max
            unless_up.pop_all()
        return self

    def load(self) -> EngineLoad:
        """How busy it is, as of a few milliseconds ago; any thread may ask, and none waits."""
        return self.core.monitor.load

    def counts(self) -> dict[str, int]:
        """Counters for metrics."""
        return dict(self.core.counters)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back once when the instance has ended and every request was told; at once if it has ended.

        The callback runs on the instance's thread, which `close` waits for: close it on another one.
        """
        with self._lock:
            if not self._has_ended:
                self._end_callbacks.append(callback)
                return
        callback()

    def close(self) -> None:
        """Ends the workers and the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.failure = self.failure or CLOSED
            self._calls.wake()
            thread.join()
        if not self._executor.is_closed:
            self._executor.close()
            self._calls.close()

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """The thread."""
        try:
            self._serve()
        finally:
            self._end(self.failure or f"its scheduler failed: {sys.exception()!r}")

    def _serve(self) -> None:
        """Handles replies and calls, and steps the core, until the instance ends."""
        workers: dict[Any, Any] = {worker.connection: worker for worker in self._executor.workers}
        sources = [self._calls.fileno(), *workers]
        while not self.failure:
            try:
                for source in wait(sources, IDLE_S if self.core.monitor.is_fresh else SNAPSHOT_S):
                    if source in workers:
                        for reply in workers[source].replies():
                            self.core.on_reply(reply, monotonic())
                    else:
                        self._calls.clear()
            except EngineError as error:
                self.failure = self._executor.failure_reason(error)
                return
            self._calls.run()
            self.core.step(monotonic())

    def _end(self, reason: str) -> None:
        """Refuses new requests, fails those that are here, and makes the callbacks, in this order."""
        self.failure = reason
        self.core.set_running(why_not=reason)
        self.core.fail_all(reason)
        self._calls.run()  # requests that were posted before the refusal
        self.core.fail_all(reason)
        with self._lock:
            self._has_ended = True
        for callback in self._end_callbacks:
            callback()

    def _warm_up(self) -> None:
        """Prefills and decodes some tokens on every dp group, so that no caller pays for the first step."""
        num_tokens = max(1, min(WARM_UP_TOKENS, self.sizes.context_max - 3))
        tokens = tuple(index % self.sizes.architecture.vocab_size for index in range(num_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        ended = threading.Semaphore(0)
        errors: list[str] = []

        def sink(event: RequestEvent) -> None:
            if isinstance(event, RequestError):
                errors.append(event.text)
            if isinstance(event, RequestError | RequestFinished):
                ended.release()

        num_groups = self.sizes.layout.size("dp")
        for _ in range(num_groups):
            # With a random salt these tokens are no prefix of a caller's prompt.
            self.core.submit(EngineRequest(tokens, params, salt=secrets.token_hex(8)), sink)
        for _ in range(num_groups):
            if not ended.acquire(timeout=WARM_UP_S_MAX):
                raise EngineError(
                    f"{self.config.name} did not compute {num_tokens} tokens in {WARM_UP_S_MAX:.0f} s"
                )
        if errors:
            raise EngineError(f"{self.config.name}: {errors[0]}")
