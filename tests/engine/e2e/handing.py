"""A hand-over whose two sides are listened to apart."""

from __future__ import annotations

import secrets
from dataclasses import replace

from tests.engine.e2e.house import WAIT_S_MAX, Listener

from baton.engine.deployment import Pair
from baton.engine.requests import (
    EngineRequest,
    InboundHandoff,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestEvent,
    RequestFinished,
)


class Handed:
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
