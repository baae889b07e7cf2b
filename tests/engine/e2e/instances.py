"""Instances that tests share: each is started once, and the longest unused end when there are too many."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from time import monotonic
from typing import Any

import pytest

from baton.engine.commands import SampledToken
from baton.engine.config import EngineConfig
from baton.engine.deployment import Pair, PairRequest
from baton.engine.instance import Instance
from baton.engine.requests import (
    EngineRequest,
    InboundHandoff,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestEvent,
    RequestFinished,
)
from baton.engine.sampling_params import SamplingParams
from baton.engine.trace import RequestTrace
from baton.errors import ConfigError, EngineError
from baton.plan import parse_layout
from baton.transport import open_transport

SECRET = b"tests of the engine, end to end."
NUM_RANKS_MAX = 16
"""Processes that are alive at a time, for the machine's memory."""
WAIT_S_MAX = 180.0


CROSSINGS = [
    ("tp1", "tp1"),
    ("tp2", "tp1"),
    ("pp2", "tp1"),
    ("cp2", "tp1"),
    ("cp2:mirror", "tp1"),
    ("cp2:split", "tp1"),
    ("tp1", "cp2:stripe1"),
    ("tp1", "tp2"),
    ("dp2.tp1", "tp2"),
    ("tp2", "pp2"),
    ("tp1", "cp2:split"),
]
"""Pairs of layouts, each axis on either side, for families that keep tokens in their own way."""


SILENCE_S = 120.0
"""A machine that others use may stand still for seconds, and no rank of it is lost then."""


@dataclass(frozen=True)
class Side:
    """What an instance is, as far as tests differ in it."""

    model: str
    layout: str = "tp1"
    name: str = "one"
    options: tuple[tuple[str, Any], ...] = ()

    def but(self, **options: Any) -> Side:
        """The same with other options of its InstanceConfig."""
        return replace(self, options=tuple(sorted({**dict(self.options), **options}.items())))

    @property
    def config(self) -> EngineConfig:
        """What it is started with."""
        options = {"pool_tokens": 4096, "num_threads": 1, "is_warmed": False, "silence_s": SILENCE_S}
        options |= dict(self.options)
        name = f"{self.name} {self.layout}".replace(":", "-")
        return EngineConfig(self.model, self.layout, name=name, secret=SECRET, **options)


class InstancePool:
    """Running instances by their configuration."""

    def __init__(self) -> None:
        self._instances: dict[Side, Instance] = {}

    def instance(self, side: Side) -> Instance:
        """Running, started now if it is not."""
        return self.instances(side)[0]

    def pair(self, prefill: Side, decode: Side) -> Pair:
        """Two of them; a side is not handed over to itself."""
        assert prefill != decode
        return Pair(*self.instances(prefill, decode))

    def instances(self, *sides: Side) -> list[Instance]:
        """Several at a time, none of which ends the others."""
        for side in sides:
            skip_without(dict(side.options).get("transport", "shm"))
            found = self._instances.pop(side, None)
            if found is not None and not found.is_running:
                found.close()
                found = None
            if found is None:
                self._make_room(side, sides)
                found = Instance(side.config).start()
            self._instances[side] = found
        return [self._instances[side] for side in sides]

    def close(self) -> None:
        """Ends all."""
        while self._instances:
            self._instances.popitem()[1].close()

    def _make_room(self, wanted: Side, kept: Sequence[Side]) -> None:
        for side in [each for each in self._instances if each not in kept]:
            alive = [*self._instances, wanted]
            if sum(parse_layout(each.layout).num_ranks for each in alive) <= NUM_RANKS_MAX:
                return
            self._instances.pop(side).close()


@contextmanager
def opened() -> Iterator[InstancePool]:
    """A pool that is closed in the end."""
    pool = InstancePool()
    try:
        yield pool
    finally:
        pool.close()


@cache
def _why_not(transport: str) -> str:
    try:
        open_transport(transport).close()
    except ConfigError as error:
        return str(error)
    return ""


def skip_without(transport: str) -> None:
    """Skips where the transport's library cannot be loaded."""
    if reason := _why_not(transport):
        pytest.skip(f"{transport}: {reason}")


@dataclass
class Heard:
    """All that came of a request: its answers by index, and the stories by role."""

    answers: dict[int, list[SampledToken]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    traces: dict[str, RequestTrace] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[SampledToken]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids by index."""
        return [[each.token for each in self.answers[index]] for index in sorted(self.answers)]

    def add(self, piece: OutputChunk) -> None:
        """One more piece."""
        self.prompt_logprobs.setdefault(piece.index, piece.prompt_logprobs)
        self.answers.setdefault(piece.index, []).extend(piece.tokens)
        self.texts[piece.index] = self.texts.get(piece.index, "") + piece.text
        if piece.finish:
            assert piece.index not in self.finishes, f"answer {piece.index} ended twice"
            self.finishes[piece.index] = piece.finish


class Listener:
    """A request on one instance, as its caller hears it."""

    def __init__(self, instance: Instance, request: EngineRequest) -> None:
        self.instance = instance
        self.events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self.number = instance.core.submit(request, self.events.put)

    def next(self, timeout_s: float = WAIT_S_MAX) -> RequestEvent:
        """What it hears next."""
        return self.events.get(timeout=timeout_s)

    def until(self, kind: type[RequestEvent], timeout_s: float = WAIT_S_MAX) -> RequestEvent:
        """The next event of a kind; others are passed over."""
        while not isinstance(event := self.next(timeout_s), kind):
            pass
        return event

    def heard(self) -> Heard:
        """All of it; a failure raises EngineError."""
        heard = Heard()
        while True:
            event = self.next()
            if isinstance(event, OutputChunk):
                heard.add(event)
            elif isinstance(event, RequestError):
                raise EngineError(event.text)
            elif isinstance(event, RequestFinished):
                heard.traces["both"] = event.trace
                return heard


Where = Instance | Pair


def ask_all(where: Where, requests: Sequence[EngineRequest], **how: Any) -> list[Heard]:
    """All requests at once, on one instance or through a pair."""
    if isinstance(where, Instance):
        listeners = [Listener(where, request) for request in requests]
        return [each.heard() for each in listeners]
    asked = [where.ask(PairRequest(request, **how)) for request in requests]
    found = []
    for answer, pieces in asked:
        heard = Heard()
        for piece in pieces:
            heard.add(piece)
        heard.traces = answer.traces
        found.append(heard)
    return found


def ask_one(where: Where, request: EngineRequest, **how: Any) -> Heard:
    """One request alone."""
    return ask_all(where, [request], **how)[0]


class BothSides:
    """One request on both instances of a pair."""

    def __init__(self, pair: Pair, request: EngineRequest) -> None:
        transfer = secrets.token_hex(16)
        inbound = InboundHandoff(transfer, pair.prefill.address)
        self.decode = Listener(pair.decode, replace(request, handoff=inbound))
        self.prefill = Listener(pair.prefill, replace(request, handoff=OutboundHandoff(transfer)))

    @property
    def sides(self) -> tuple[Listener, Listener]:
        """Prefill and decode."""
        return self.prefill, self.decode


def end_of(listener: Listener, timeout_s: float = WAIT_S_MAX) -> tuple[list[int], RequestEvent]:
    """The tokens that a request got, and what it ended with: its story, or trouble."""
    answers, end = ends_of(listener, timeout_s)
    return answers.get(0, []), end


def ends_of(listener: Listener, timeout_s: float = WAIT_S_MAX) -> tuple[dict[int, list[int]], RequestEvent]:
    """The same for a request with several answers, by index."""
    answers: dict[int, list[int]] = {}
    while True:
        event = listener.next(timeout_s)
        if isinstance(event, OutputChunk):
            answers.setdefault(event.index, []).extend(sampled.token for sampled in event.tokens)
        elif isinstance(event, RequestFinished | RequestError):
            return answers, event


def greedy(tokens: Sequence[int], num_tokens: int, *, salt: str = "", **params: Any) -> EngineRequest:
    """A request for exactly so many likeliest tokens."""
    wanted = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **params}
    return EngineRequest(tuple(tokens), SamplingParams(**wanted), salt=salt)


def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S_MAX) -> None:
    """Returns as soon as a condition of other threads or processes holds."""
    limit_s = monotonic() + timeout_s
    while not condition():
        assert monotonic() < limit_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.005)


@contextmanager
def stopped(instance: Instance) -> Iterator[None]:
    """The ranks compute nothing meanwhile, however slowly the test itself runs."""
    pids = instance.pids.values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def check_idle(*instances: Instance) -> None:
    """Nothing is under way any more, and every page is free or a cached prefix."""
    for instance in instances:
        core = instance.core
        until(lambda core=core: not core.requests, f"{instance.config.name} has no requests: {core.requests}")
        for scheduler in core.schedulers:
            until(lambda scheduler=scheduler: scheduler.is_idle, f"{instance.config.name} is idle")
            scheduler.check_integrity()
            for count in [pool.counts() for pool in scheduler.kv_cache.pools.values()]:
                assert count.num_used == 0, f"pages are kept for nobody: {count}"
