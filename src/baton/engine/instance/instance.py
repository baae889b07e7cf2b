"""An instance as its caller holds it: rank processes, and one thread that schedules them.

The thread owns everything that changes; callers reach it by a queue, and hear back by their sinks, which it
calls. When a rank ends, the instance ends: every request that is under way fails with the rank's last words.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic
from types import TracebackType
from typing import Self

from baton.engine.books.limits import SchedulerConfig
from baton.engine.books.scheduler import Scheduler
from baton.engine.books.shares import Shares
from baton.engine.checkpoint.tokenizer import eos_ids, load_tokenizer
from baton.engine.instance.children import Child, Meeting
from baton.engine.instance.config import InstanceConfig, Sizes, derive
from baton.engine.instance.desk import Desk, Premises
from baton.engine.instance.record import Facts
from baton.engine.instance.warming import warm
from baton.engine.rank.config import RankConfig
from baton.engine.requests import Generate, Sink
from baton.engine.steps import Answer, Attach, Down, Order, Stop, Up
from baton.engine.text.tokenizer import Tokenizer
from baton.errors import EngineError

START_S_MAX = 300.0
IDLE_S = 0.5
"""How often a waiting thread looks at deadlines."""


class Instance:
    """A model, running in one layout."""

    def __init__(self, config: InstanceConfig, sizes: Sizes | None = None) -> None:
        self.config = config
        self.sizes = sizes or derive(config)
        self.secret = config.secret or secrets.token_bytes(32)
        backend = load_tokenizer(self.sizes.checkpoint)
        self.tokenizer = Tokenizer(backend) if backend is not None else None
        self.eos_ids = frozenset(eos_ids(self.sizes.checkpoint, backend))
        self.address = ""
        """The coordinator's host:port, by which others ask for hand-overs."""
        self.registry = ""
        self._meeting = Meeting()
        self._children: list[Child] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self.desk = Desk(self._premises(), self._numbers)

    def start(self, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Starts the ranks and waits until all are there; call it from a thread that lives as long."""
        layout = self.sizes.layout
        try:
            self._children = [Child(self._rank_config(rank)) for rank in range(layout.num_ranks)]
            first = self._await_up(self._children[0])
            self.address, self.registry = first.coordinator, first.registry
            for child in self._children[1:]:
                child.tell(Attach(first.coordinator, first.epoch))
            for child in self._children[1:]:
                self._await_up(child)
                progress(f"{self.config.name}: rank {child.rank} is up")
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"baton {self.config.name}", daemon=True)
        self._thread.start()
        if self.config.is_warmed:
            warm(self)
        return self

    def submit(self, request: Generate, sink: Sink) -> int:
        """Takes a request in and answers its number; raises ConfigError on one that could never be served."""
        self.desk.check(request)
        if self._failure:
            raise EngineError(f"{self.config.name} has ended: {self._failure}")
        number = next(self._numbers)
        arrived_s = monotonic()
        self._post(lambda: self.desk.take(number, request, sink, arrived_s))
        return number

    def abort(self, number: int, text: str = "aborted by the caller") -> None:
        """Gives a request up, on both sides of its hand-over; its pages return when they can."""
        self._post(lambda: self.desk.abort(number, text))

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._thread is not None and not self._failure

    @property
    def failure(self) -> str:
        """Why the instance ended, where it did by itself."""
        return self._failure

    def counts(self) -> dict[str, int]:
        """How much is under way, for metrics."""
        return dict(self.desk.counters)

    def close(self) -> None:
        """Ends the ranks and the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._failure = self._failure or "it was closed"
            self._wake()
            thread.join()
        for child in self._children:
            child.tell(Stop())
        for child in self._children:
            child.close()
        self._children = []
        self._meeting.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The thread.

    def _run(self) -> None:
        by_connection = {child.connection: child for child in self._children}
        sources = [self._wake_reader, *by_connection]
        while not self._failure:
            for source in wait(sources, IDLE_S):
                if isinstance(source, Connection):
                    self._hear(by_connection[source])
                else:
                    os.read(self._wake_reader, 4096)
            while self._calls:
                self._calls.popleft()()
            self.desk.pump(monotonic())
        self.desk.fail_all(self._failure)

    def _hear(self, child: Child) -> None:
        """Everything that one rank has said so far."""
        while child.connection.poll():
            try:
                answer = child.heard()
            except EngineError as error:
                self._failure = str(error)
                return
            if isinstance(answer, Down):
                self._failure = f"{child.name}: {answer.text}"
                return
            self.desk.heard(answer, monotonic())

    def _tell(self, order: Order) -> None:
        """Every rank hears every order."""
        raw = Child.encode(order)
        for child in self._children:
            child.tell_raw(raw)

    def _post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:
            pass  # it is awake already

    # The start.

    def _premises(self) -> Premises:
        config, sizes = self.config, self.sizes
        shares = Shares(sizes.layout, sizes.cache, config.page_tokens)
        limits = SchedulerConfig(
            chunk_tokens=config.chunk_tokens,
            batch_tokens_max=max(config.chunk_tokens, config.sequences_max) * 2,
            sequences_max=config.sequences_max,
            context_tokens_max=sizes.context_max,
            chunks_in_flight=sizes.layout.size("pp"),
        )
        schedulers = [Scheduler(limits, shares, sizes.num_pages) for _ in range(sizes.layout.size("dp"))]
        facts = Facts(self.tokenizer, self.eos_ids, sizes.context_max)
        return Premises(
            config.name, sizes.layout, schedulers, facts, sizes.architecture.vocab_size, self._tell
        )

    def _rank_config(self, rank: int) -> RankConfig:
        config, sizes = self.config, self.sizes
        return RankConfig(
            instance=config.name,
            model=config.model,
            layout=config.layout,
            rank=rank,
            role=config.role,
            secret=self.secret,
            rendezvous=self._meeting.path,
            num_pages=dict(sizes.num_pages),
            page_tokens=config.page_tokens,
            dtype=config.dtype,
            device=config.device,
            num_threads=sizes.num_threads,
            transport=config.transport,
            link_bytes_per_s=config.link_bytes_per_s,
            policy=config.policy,
            host=config.host,
            registry=config.registry,
            embed_registry=config.embed_registry,
            eos_ids=tuple(sorted(self.eos_ids)),
            context_max=sizes.context_max,
        )

    def _await_up(self, child: Child) -> Up:
        """The first word of a rank, while the others may fail too."""
        limit_s = monotonic() + START_S_MAX
        while not child.connection.poll(IDLE_S):
            self._check_alive()
            if monotonic() > limit_s:
                raise EngineError(f"{child.name} did not start in {START_S_MAX:.0f} s")
        answer: Answer = child.heard()
        if isinstance(answer, Down):
            raise EngineError(f"{child.name}: {answer.text}")
        assert isinstance(answer, Up), f"{child.name} said {answer} before it was up"
        return answer

    def _check_alive(self) -> None:
        for child in self._children:
            if child.process.poll() is not None and not child.connection.poll():
                child.heard()
