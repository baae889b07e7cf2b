"""Hand-overs of a worker: begun once by the compute thread, and reported with the layers of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from baton.engine.commands import (
    AbortTransfer,
    CopyRecord,
    LayerReady,
    QueueTransfer,
    Reply,
    SendCached,
    SendKV,
)
from baton.engine.connector import KVConnector, with_layers_ready
from baton.engine.cost_model import CostModel
from baton.errors import LocalProtocolError
from baton.plan import parse_layout
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.session import CheckedPages, Digest, Sending

PAGES = {"full": [3, 4]}
CAUSE = Cause(Why.PEER_LOST, Stage.COPY, "there")


class StubEndpoint:
    """Records what it is asked."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.config = SimpleNamespace(
            rank=0, instance="here", spec=SimpleNamespace(layout=parse_layout("tp1"))
        )
        self.calls: list[str] = []
        self._is_closed = is_closed

    def on_change(self, callback: object) -> None:
        """Nothing changes."""

    def send(self, transfer: str, digest: Digest, *, is_queued: bool = False) -> Sending:
        if self._is_closed:
            raise LocalProtocolError("closed")
        self.calls.append(f"queue {transfer}" if is_queued else f"send {transfer}")
        return Sending(transfer, digest.num_tokens, StubDriver(self.calls), lambda action: action())


@dataclass
class StubDriver:
    """Records what a handle asks of its driver."""

    calls: list[str]

    def read_pages(self, pages: Any) -> CheckedPages:
        return CheckedPages(pages)

    def chunk_ready(self, sending: Sending, offered: Any) -> None:
        self.calls.append(f"ready {offered.layers} {offered.tokens}")

    def queued(self, sending: Sending) -> None:
        self.calls.append("queued")

    def abort_sending(self, sending: Sending, text: str) -> None:
        self.calls.append(f"abort {text}")


def connector(endpoint: StubEndpoint, replies: list[Reply], *, begins_with_step: bool = True) -> KVConnector:
    return KVConnector(endpoint, (0, 4), CostModel(), replies.append, begins_with_step=begins_with_step)


def command(num_cached: int = 0) -> SendKV:
    return SendKV(7, 0, "t", bytes(16), 32, num_cached, PAGES)


@pytest.mark.parametrize("begins_with_step", [False, True])
def test_a_handoff_begins_once_and_its_cached_tokens_are_ready(begins_with_step: bool) -> None:
    endpoint = StubEndpoint()
    connected = connector(endpoint, [], begins_with_step=begins_with_step)
    connected.send(command(num_cached=16))
    assert bool(endpoint.calls) is not begins_with_step
    for _ in range(2):
        connected.begin(connected._outgoing[7])
    assert endpoint.calls == ["send t", "ready (0, 4) (0, 16)"]


def test_a_queued_handoff_is_offered_at_once_and_its_cached_tokens_when_it_starts() -> None:
    endpoint = StubEndpoint()
    connected = connector(endpoint, [])
    connected.send(replace(command(), is_queued=True))
    connected.queue(QueueTransfer(0, "t"))
    connected.queue(QueueTransfer(0, "another"))
    connected.send_cached(SendCached(7, 16, PAGES))
    assert endpoint.calls == ["queue t", "queued", "ready (0, 4) (0, 16)"]
    connected._outgoing[7].sending.conclude(Failed(CAUSE))
    connected.send_cached(SendCached(7, 16, PAGES))
    connected.send_cached(SendCached(8, 16, PAGES))
    assert len(endpoint.calls) == 3, "it has ended, or was never there"


def test_a_handoff_that_is_aborted_before_it_began_is_opened_to_get_an_outcome() -> None:
    endpoint = StubEndpoint()
    connected = connector(endpoint, [])
    connected.send(command())
    connected.abort(AbortTransfer(7, "enough"))
    assert endpoint.calls == ["send t", "abort enough"]


def test_a_handoff_that_cannot_begin_is_reported_and_nothing_waits_for_it() -> None:
    replies: list[Reply] = []
    connected = connector(StubEndpoint(is_closed=True), replies)
    connected.send(command())
    transfer = connected._outgoing[7]
    connected.begin(transfer)
    assert transfer.answered.is_set()
    assert transfer.sending is None
    (update,) = replies
    assert isinstance(update.outcome, Failed)
    assert update.is_released


def test_copied_bytes_are_divided_among_layers() -> None:
    """Chunk 1 went in two copies, and is half of what is kept: another mirror sent the other half."""
    sent = ((0, 70), (1, 120), (1, 80), (2, 0))
    copies = [CopyRecord(0, chunk, num_bytes, 1.0, 2.0) for chunk, num_bytes in sent]
    layers = {1: [LayerReady(2.0, 100), LayerReady(2.5, 300, 200)], 3: [LayerReady(3.0, 50)]}
    completed = with_layers_ready(copies, layers, {1: 2.5})
    assert [copy.layers_ready for copy in completed] == [
        [LayerReady(0.0, 70)],
        [LayerReady(2.0, 50), LayerReady(2.5, 150, 100)],
        [],
        [],
    ]
    assert [(copy.chunk, copy.num_bytes) for copy in completed] == list(sent)
    assert with_layers_ready(copies[:1], {}, {0: 1.5})[0].layers_ready == [LayerReady(1.5, 70)]
