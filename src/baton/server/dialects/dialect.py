"""What every dialect promises: events as an answer grows, and the whole of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

from baton.server.answering import Growth
from baton.server.bodies.answered import Usage
from baton.server.inquiries import Inquiry
from baton.server.naming import TokenNames


class Dialect(ABC):
    """One request's answer in the words of its endpoint."""

    def __init__(self, inquiry: Inquiry, model: str, names: TokenNames) -> None:
        self.inquiry = inquiry
        self.model = model
        self.names = names

    @property
    def num_top(self) -> int | None:
        """How many likely tokens are told in each token's place; None: no log-probabilities at all."""
        return self.inquiry.jobs[0].request.params.logprobs

    def echo(self, growth: Growth) -> str:
        """What goes ahead of a choice's first text."""
        return self.inquiry.echoes[growth.index // self.inquiry.n] if growth.is_first else ""

    def is_silent(self, growth: Growth) -> bool:
        """Whether nothing of a growth would be seen, so that it may wait for the next one."""
        has_more = growth.finish or growth.is_first or self.num_top is not None or self.inquiry.has_ids
        return not growth.text and not has_more

    @abstractmethod
    def event(self, growth: Growth) -> msgspec.Struct:
        """An event of the stream: what a choice has grown by."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> msgspec.Struct | None:
        """The event that tells the usage, where the endpoint has one."""

    @abstractmethod
    def whole(self, grown: Iterable[Growth], usage: Usage) -> object:
        """The answer to a request that wants no stream; every choice has grown just once."""


def ids_of(growth: Growth) -> list[int]:
    """The token ids of a growth."""
    return [sampled.token for sampled in growth.tokens]
