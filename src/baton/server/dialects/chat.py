"""The words of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from baton.server.answering import Growth
from baton.server.bodies.answered import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    DeltaChoice,
    TokenLogprob,
    Usage,
)
from baton.server.dialects.dialect import Dialect, ids_of
from baton.server.naming import finite, likeliest

ROLE = "assistant"


class ChatDialect(Dialect):
    """Choices are messages; the role of each comes with its first text."""

    def event(self, growth: Growth) -> ChatChunk:
        """An event of the stream."""
        delta = Delta(growth.text, ROLE if growth.is_first else UNSET)
        ids = ids_of(growth) if self.inquiry.has_ids else UNSET
        choice = DeltaChoice(growth.index, delta, self._logprobs(growth), growth.finish, ids)
        usage = None if self.inquiry.has_usage else UNSET
        return ChatChunk(self.inquiry.id, self.inquiry.created, self.model, [choice], usage=usage)

    def usage_event(self, usage: Usage) -> ChatChunk:
        """An event without choices."""
        return ChatChunk(self.inquiry.id, self.inquiry.created, self.model, [], usage=usage)

    def whole(self, grown: Iterable[Growth], usage: Usage) -> ChatCompletion:
        """All choices."""
        choices = [
            ChatChoice(
                growth.index,
                AssistantMessage(growth.text),
                growth.finish,
                self._logprobs(growth),
                ids_of(growth) if self.inquiry.has_ids else UNSET,
            )
            for growth in grown
        ]
        return ChatCompletion(self.inquiry.id, self.inquiry.created, self.model, choices, usage)

    def _logprobs(self, growth: Growth) -> ChatLogprobs | None:
        num_top = self.num_top
        if num_top is None:
            return None
        found = []
        for sampled in growth.tokens:
            name, raw = self.names.name(sampled.token)
            tops = [
                TokenLogprob(self.names.name(token)[0], logprob, self.names.name(token)[1])
                for token, logprob in likeliest(sampled, num_top)
            ]
            found.append(ChatLogprob(name, finite(sampled.logprob), raw, tops))
        return ChatLogprobs(found)
