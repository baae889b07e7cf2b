"""The words of /generate: every event of its stream holds the whole answer so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from baton.server.answering import Growth
from baton.server.bodies.answered import Generated, GenerateMeta, Usage
from baton.server.dialects.dialect import Dialect, ids_of
from baton.server.inquiries import Inquiry
from baton.server.naming import TokenNames, finite, likeliest


class GenerateDialect(Dialect):
    """One object per answer, and a list of them where there are several."""

    def __init__(self, inquiry: Inquiry, model: str, names: TokenNames) -> None:
        super().__init__(inquiry, model, names)
        self._whole: dict[int, Growth] = {}

    @property
    def _is_single(self) -> bool:
        return len(self.inquiry.prompts) * self.inquiry.n == 1

    def event(self, growth: Growth) -> Generated:
        """An event of the stream."""
        known = self._whole.get(growth.index)
        if known is not None:
            growth = replace(
                growth,
                text=known.text + growth.text,
                tokens=[*known.tokens, *growth.tokens],
            )
        self._whole[growth.index] = growth
        return self._generated(growth, 0)

    def usage_event(self, usage: Usage) -> None:
        """Its events tell it themselves."""
        del usage

    def whole(self, grown: Iterable[Growth], usage: Usage) -> object:
        """An object, or a list."""
        num_cached = usage.prompt_tokens_details.cached_tokens
        found = [self._generated(growth, num_cached) for growth in grown]
        return found[0] if self._is_single else found

    def _generated(self, growth: Growth, num_cached: int) -> Generated:
        place = growth.index // self.inquiry.n
        earlier = self.inquiry.resumed.get(growth.index, ())
        ids = [*earlier, *ids_of(growth)]
        finish: dict[str, Any] | None = {"type": growth.finish} if growth.finish else None
        if growth.finish == "length" and finish is not None:
            finish["length"] = len(ids)
        rid = getattr(self.inquiry.body, "rid", None)
        name = rid if isinstance(rid, str) and rid else self.inquiry.id
        num_top = self.num_top
        meta = GenerateMeta(
            name,
            finish,
            len(self.inquiry.prompts[place]),
            len(ids),
            num_cached,
            UNSET if num_top is None else [self._told(each.logprob, each.token) for each in growth.tokens],
            [
                [self._told(logprob, token) for token, logprob in likeliest(each, num_top)]
                for each in growth.tokens
            ]
            if num_top
            else UNSET,
        )
        return Generated(growth.text, ids, meta, UNSET if self._is_single else growth.index)

    def _told(self, logprob: float, token: int) -> tuple[float, int, str]:
        return finite(logprob), token, self.names.name(token)[0]
