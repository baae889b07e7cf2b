"""What requests are made of in these tests: a model without an instance, and a place to ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tests.engine.text.vocabularies import tokenizer

from baton.server.bodies.asked import ChatRequest, CompletionRequest, GenerateRequest
from baton.server.bodies.reading import reader_of
from baton.server.inquiries import Inquiry, Place, inquire
from baton.server.model import Model
from baton.web import Caller

CONTEXT = 64
VOCABULARY = 432
NEAR = Caller(is_loopback=True)
FAR = Caller()
DECODE = Place("decode", "127.0.0.1:7001", "prefill", "tiny")
PREFILL = Place("prefill", "127.0.0.1:7000", "prefill", "tiny")

READERS = {
    "completions": reader_of(CompletionRequest),
    "chat": reader_of(ChatRequest),
    "generate": reader_of(GenerateRequest),
}


def model(*, has_tokenizer: bool = True) -> Model:
    """A model of a small context."""
    return Model(tokenizer() if has_tokenizer else None, CONTEXT, VOCABULARY, lambda num_prompt: CONTEXT)


def read(kind: str, body: Any) -> Any:
    """A body as the server reads it."""
    return READERS[kind](body if isinstance(body, bytes) else msgspec.json.encode(body))


def asked(
    body: dict[str, Any], kind: str = "completions", caller: Caller = NEAR, place: Place = DECODE
) -> Inquiry:
    """The inquiry that a body comes to."""
    return asyncio.run(inquire(read(kind, body), caller, model(), place))
