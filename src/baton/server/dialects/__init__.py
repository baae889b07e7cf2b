"""How answers are put: one file per endpoint."""

from __future__ import annotations

from baton.server.bodies.asked import ChatRequest, CompletionRequest
from baton.server.dialects.chat import ChatDialect
from baton.server.dialects.completion import CompletionDialect
from baton.server.dialects.dialect import Dialect
from baton.server.dialects.generate import GenerateDialect
from baton.server.inquiries import Inquiry
from baton.server.naming import TokenNames

__all__ = ["Dialect", "dialect_of"]


def dialect_of(inquiry: Inquiry, model: str, names: TokenNames) -> Dialect:
    """The form in which a request is answered."""
    match inquiry.body:
        case ChatRequest():
            return ChatDialect(inquiry, model, names)
        case CompletionRequest():
            return CompletionDialect(inquiry, model, names)
        case _:
            return GenerateDialect(inquiry, model, names)
