"""The words of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from baton.server.answering import Growth
from baton.server.bodies.answered import Completion, CompletionChoice, CompletionLogprobs, Usage
from baton.server.dialects.dialect import Dialect, ids_of
from baton.server.inquiries import Inquiry
from baton.server.naming import TokenNames, finite, likeliest


class CompletionDialect(Dialect):
    """Choices have text."""

    def __init__(self, inquiry: Inquiry, model: str, names: TokenNames) -> None:
        super().__init__(inquiry, model, names)
        self._offsets: dict[int, int] = {}
        """By choice: where its next token's text begins."""

    def event(self, growth: Growth) -> Completion:
        """An event of the stream."""
        usage = None if self.inquiry.has_usage else UNSET
        return Completion(
            self.inquiry.id, self.inquiry.created, self.model, [self._choice(growth)], usage=usage
        )

    def usage_event(self, usage: Usage) -> Completion:
        """An event without choices."""
        return Completion(self.inquiry.id, self.inquiry.created, self.model, [], usage=usage)

    def whole(self, grown: Iterable[Growth], usage: Usage) -> Completion:
        """All choices."""
        choices = [self._choice(growth) for growth in grown]
        return Completion(self.inquiry.id, self.inquiry.created, self.model, choices, usage=usage)

    def _choice(self, growth: Growth) -> CompletionChoice:
        return CompletionChoice(
            growth.index,
            self.echo(growth) + growth.text,
            self._logprobs(growth),
            growth.finish,
            ids_of(growth) if self.inquiry.has_ids else UNSET,
        )

    def _logprobs(self, growth: Growth) -> CompletionLogprobs | None:
        num_top = self.num_top
        if num_top is None:
            return None
        names = [self.names.name(sampled.token)[0] for sampled in growth.tokens]
        tops = [
            {self.names.name(token)[0]: logprob for token, logprob in likeliest(sampled, num_top + 1)}
            for sampled in growth.tokens
        ]
        offset = self._offsets.get(growth.index)
        if offset is None:
            earlier = self.inquiry.resumed.get(growth.index, ())
            offset = sum(len(self.names.name(token)[0]) for token in earlier)
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[growth.index] = offset
        values = [finite(sampled.logprob) for sampled in growth.tokens]
        return CompletionLogprobs(names, values, tops, offsets)
