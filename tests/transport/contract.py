"""The parts of the contract suite: a check, the broken variants it has to catch, and the world it runs in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
from tests.transport.ends import End, Handle, LocalEnd, RemoteEnd, open_end
from tests.transport.subjects import restart_options

from baton.errors import ConfigError
from baton.plan.steps import Spans
from baton.transport import (
    Capabilities,
    Completion,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
    Reach,
    Region,
    RemoteRegion,
    Ticket,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A broken variant (of broken.py) at one side of a subject, which the check must catch."""

    name: str
    side: str = "source"
    subject: str = "memory"


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract."""

    name: str
    run: Callable[[World], None]
    variants: tuple[Variant, ...]


CHECKS: dict[str, Check] = {}


def check(*variants: Variant) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Adds a function to the suite, with the broken variants that it catches."""

    def add(run: Callable[[World], None]) -> Callable[[World], None]:
        name = run.__name__
        assert variants, f"{name} needs a broken variant that it catches"
        assert inspect.getdoc(run), f"{name} needs a sentence"
        CHECKS[name] = Check(name, run, variants)
        return run

    return add


@dataclass(frozen=True, slots=True)
class Link:
    """A connection from a source to a region of a target, and the peers at both its ends."""

    source: End
    target: Handle
    peer: Peer
    writer: Peer
    region: RemoteRegion

    def send(self, source: Region, spans: Spans, **how: Any) -> Ticket:
        return self.source.send(self.peer, source, self.region, spans, **how)

    def content(self) -> np.ndarray:
        return np.frombuffer(self.target.call("read", self.region.number), dtype=np.uint8)


class World:
    """A source in this process, and targets and writers in as many others as a check asks for."""

    def __init__(
        self, subject: str, source_variant: str | None = None, target_variant: str | None = None
    ) -> None:
        self.subject = subject
        self.target_variant = target_variant
        self.stack = ExitStack()
        try:
            self.source = open_end(subject, source_variant)
        except ConfigError as cause:
            pytest.skip(f"{subject} cannot run here: {cause}")
        self.stack.callback(self.source.close)
        self.options = restart_options(subject)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    @property
    def capabilities(self) -> Capabilities:
        return self.source.transport.capabilities

    @property
    def is_one_process(self) -> bool:
        return self.capabilities.reach is Reach.PROCESS

    def target(self, **options: Any) -> Handle:
        """A target, in a process of its own where the transport reaches that far."""
        return self._end(self.target_variant, options)

    def restartable_target(self) -> RemoteEnd:
        """A target whose addresses a later one gets."""
        self.needs_processes()
        end = self._end(self.target_variant, self.options)
        assert isinstance(end, RemoteEnd)
        return end

    def remote_target(self) -> RemoteEnd:
        """A target that can be killed and stopped."""
        self.needs_processes()
        end = self.target()
        assert isinstance(end, RemoteEnd)
        return end

    def remote_source(self) -> RemoteEnd:
        """A source that can be killed and stopped."""
        self.needs_processes()
        end = self._end(None, {})
        assert isinstance(end, RemoteEnd)
        return end

    def needs_processes(self) -> None:
        if self.is_one_process:
            pytest.skip(f"{self.subject} lives in one process: there is nobody to kill or stop")

    def _end(self, variant: str | None, options: dict[str, Any]) -> Handle:
        end = (LocalEnd if self.is_one_process else RemoteEnd)(self.subject, variant, options)
        self.stack.callback(end.end)
        return end

    def link(self, target: Handle, num_bytes: int, *, is_granted: bool = True) -> Link:
        """A fresh region of the target, a peer invited to write it, and the connection from the source."""
        region = target.call("expose", num_bytes)
        invitation = target.call("invite")
        if is_granted:
            target.call("grant", invitation.peer, region.number)
        peer = self.source.connect(invitation.description)
        return Link(self.source, target, peer, invitation.peer, region)


def completions(end: End, tickets: list[Ticket], timeout_s: float = 120.0) -> dict[Ticket, Completion]:
    """How these tickets ended, each once; fails when one does not end in time."""
    ended: dict[Ticket, Completion] = {}
    while len(ended) < len(tickets):
        events = end.events(1, timeout_s)
        assert events, f"{len(tickets) - len(ended)} of {len(tickets)} tickets did not end in {timeout_s} s"
        for event in events:
            if isinstance(event, Done | FailedQuiet | FailedUnknown):
                assert event.ticket not in ended, f"{event.ticket} ended twice"
                assert event.ticket in tickets, f"{event.ticket} is not ours"
                ended[event.ticket] = event
    return ended


def expect_done(end: End, tickets: list[Ticket], timeout_s: float = 120.0) -> None:
    for completion in completions(end, tickets, timeout_s).values():
        assert isinstance(completion, Done), completion


def expect_failed(end: End, tickets: list[Ticket], timeout_s: float = 120.0) -> None:
    for completion in completions(end, tickets, timeout_s).values():
        assert isinstance(completion, FailedQuiet | FailedUnknown), completion


def one_span(length: int, source: int = 0, target: int = 0) -> Spans:
    return spans_of([source], [target], [length])


def spans_of(source: Any, target: Any, length: Any) -> Spans:
    return Spans(*(np.asarray(values, dtype=np.int64) for values in (source, target, length)))


def apply(spans: Spans, source: np.ndarray, target: np.ndarray) -> None:
    """Copies a batch the plain way, span by span."""
    source = np.asarray(source)
    triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    for read, write, length in triples:
        target[write : write + length] = source[read : read + length]


def random_spans(seed: int, source_bytes: int, target_bytes: int, length_max: int) -> Spans:
    """Spans of random lengths at random places, disjoint at the target, with gaps between them."""
    rng = np.random.default_rng(seed)
    num_cuts = 2 * (2 * target_bytes // (length_max + 1) // 2)
    cuts = np.unique(rng.integers(0, target_bytes, max(2, num_cuts)))
    cuts = cuts[: len(cuts) // 2 * 2]
    target = cuts[0::2]
    length = np.minimum(cuts[1::2] - target, rng.integers(1, length_max + 1, len(target)))
    order = rng.permutation(len(target))
    target, length = target[order], length[order]
    return spans_of(rng.integers(0, source_bytes - length + 1), target, length)
