"""An instance as its caller holds it: rank processes, and one thread that schedules them.

The thread owns everything that changes; callers reach it by a mailbox, and hear back by their sinks, which it
calls. When a rank ends, the instance ends: every request that is under way fails with the rank's last words.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from time import monotonic
from types import TracebackType
from typing import Any, Self

from baton.engine.books.limits import SchedulerConfig
from baton.engine.books.scheduler import Scheduler
from baton.engine.books.shares import Shares
from baton.engine.checkpoint.tokenizer import eos_ids, load_tokenizer
from baton.engine.instance.children import Child
from baton.engine.instance.config import InstanceConfig, Sizes, derive
from baton.engine.instance.crew import Crew, answers
from baton.engine.instance.desk import Desk
from baton.engine.instance.door import Door
from baton.engine.instance.load import LOOK_S, Load
from baton.engine.instance.mailbox import Mailbox
from baton.engine.instance.premises import Premises
from baton.engine.instance.record import Facts
from baton.engine.instance.warming import warm
from baton.engine.rank.config import RankConfig
from baton.engine.requests import Generate, Sink
from baton.engine.text.tokenizer import Tokenizer
from baton.errors import EngineError

IDLE_S = 0.5
"""How often a waiting thread looks at deadlines."""
CLOSED = "it was closed"


class Instance:
    """A model, running in one layout."""

    def __init__(self, config: InstanceConfig, sizes: Sizes | None = None) -> None:
        self.config = config
        self.sizes = sizes or derive(config)
        self.secret = config.secret or secrets.token_bytes(32)
        backend = load_tokenizer(self.sizes.checkpoint)
        self.tokenizer = Tokenizer(backend) if backend is not None else None
        self.eos_ids = frozenset(eos_ids(self.sizes.checkpoint, backend))
        self.failure = ""
        """Why the instance ended, once it has."""
        self._crew = Crew()
        self._mailbox = Mailbox()
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._door = Door(config.name, config.queue_max)
        self.desk = Desk(self._premises(), self._numbers)

    @property
    def address(self) -> str:
        """The coordinator's host:port, by which others ask for hand-overs."""
        return self._crew.up.coordinator

    @property
    def epoch(self) -> int:
        """Which start of the instance this is, larger with each; 0 before it is up."""
        return self._crew.up.epoch

    @property
    def registry(self) -> str:
        """The URL of the registry, hosted here or elsewhere."""
        return self._crew.up.registry

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._thread is not None and not self.failure

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {child.rank: child.process.pid for child in self._crew.connections.values()}

    def start(self, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Starts the ranks and waits until all are there; call it from a thread that lives as long."""
        is_up = False
        try:
            self._crew.start(
                [self._rank_config(rank) for rank in range(self.sizes.layout.num_ranks)], progress
            )
            self._thread = threading.Thread(target=self._run, name=f"baton {self.config.name}", daemon=True)
            self._thread.start()
            if self.config.is_warmed:
                warm(self)
            is_up = True
        finally:
            if not is_up:
                self.close()
        return self

    def submit(self, request: Generate, sink: Sink) -> int:
        """Takes a request in and answers its number.

        Raises ConfigError on one that could never be served, FullError where too many wait already.
        """
        self.desk.check(request)
        if not self.is_running:
            raise EngineError(f"{self.config.name} is not running: {self.failure or 'it was not started'}")
        number, arrived_s = next(self._numbers), monotonic()
        take = partial(self.desk.take, number, request, sink, arrived_s)
        self._door.enter(self.desk.gauge, lambda: self._mailbox.post(take))
        return number

    def abort(self, number: int, text: str = "aborted by the caller") -> None:
        """Gives a request up, on both sides of its hand-over; its pages return when they can."""
        self._mailbox.post(lambda: self.desk.abort(number, text, monotonic()))

    def load(self) -> Load:
        """How busy it is, as of a few milliseconds ago; any thread may ask, and none waits."""
        return self.desk.gauge.load

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back once when it has failed or was closed, and every request has heard of it.

        On the instance's thread, which `close` waits for: close it on another one. At once if it has ended.
        """
        self._door.on_end(callback)

    def counts(self) -> dict[str, int]:
        """How much there was and is, for metrics."""
        return dict(self.desk.counters)

    def close(self) -> None:
        """Ends the ranks and the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.failure = self.failure or CLOSED
            self._mailbox.wake()
            thread.join()
        if not self._crew.is_closed:
            self._crew.close()
            self._mailbox.close()

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """The thread: whatever ends it, nobody waits for it any longer."""
        try:
            self._serve()
        finally:
            self.failure = self.failure or f"its scheduler failed: {sys.exception()!r}"
            self._door.shut(self.failure)
            self.desk.fail_all(self.failure)
            # Requests that were on their way when it ended hear of it too.
            self._mailbox.run()
            self.desk.fail_all(self.failure)
            self._door.end()

    def _serve(self) -> None:
        """Answers, calls, decisions, until the instance ends."""
        children: dict[Any, Child] = dict(self._crew.connections)
        sources = [self._mailbox.fileno(), *children]
        while not self.failure:
            try:
                for source in wait(sources, IDLE_S if self.desk.gauge.is_fresh else LOOK_S):
                    self._attend(children.get(source))
            except EngineError as error:
                self.failure = self._crew.why(error)
                return
            self._mailbox.run()
            self.desk.pump(monotonic())

    def _attend(self, child: Child | None) -> None:
        if child is None:
            self._mailbox.clear()
            return
        for answer in answers(child):
            self.desk.heard(answer, monotonic())

    def _premises(self) -> Premises:
        config, sizes = self.config, self.sizes
        shares = Shares(sizes.layout, sizes.cache, config.page_tokens)
        limits = SchedulerConfig(
            chunk_tokens=config.chunk_tokens,
            batch_tokens_max=2 * max(config.chunk_tokens, config.sequences_max),
            sequences_max=config.sequences_max,
            context_tokens_max=sizes.context_max,
            chunks_in_flight=sizes.layout.size("pp"),
        )
        schedulers = [Scheduler(limits, shares, sizes.num_pages) for _ in range(sizes.layout.size("dp"))]
        facts = Facts(self.tokenizer, self.eos_ids, sizes.context_max, config.has_prefix_cache)
        return Premises(
            name=config.name,
            layout=sizes.layout,
            schedulers=schedulers,
            facts=facts,
            vocab_size=sizes.architecture.vocab_size,
            hidden_size=sizes.architecture.hidden_size,
            tell=self._crew.tell,
        )

    def _rank_config(self, rank: int) -> RankConfig:
        config, sizes = self.config, self.sizes
        return RankConfig(
            instance=config.name,
            model=sizes.model,
            layout=config.layout,
            rank=rank,
            role=config.role,
            secret=self.secret,
            rendezvous=self._crew.meeting.path,
            num_pages=dict(sizes.num_pages),
            page_tokens=config.page_tokens,
            dtype=config.dtype,
            device=config.device,
            num_threads=sizes.num_threads,
            transport=config.transport,
            link_bytes_per_s=config.link_bytes_per_s,
            policy=config.policy,
            host=config.host,
            port=config.port,
            tls=config.tls,
            url=config.url,
            registry=config.registry,
            embed_registry=config.embed_registry,
            silence_s=config.silence_s,
            has_draft=config.has_draft,
            eos_ids=tuple(sorted(self.eos_ids)),
            context_max=sizes.context_max,
        )
