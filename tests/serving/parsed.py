"""What requests are made of in these tests: a model without an instance, and a place to ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tests.engine.text.vocabularies import tokenizer

from baton.serving.http import Caller
from baton.serving.openai import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ParsedRequest,
    ReceivingInstance,
    ServedModel,
    parse_request,
    reader_of,
)

CONTEXT = 64
VOCABULARY = 432
NEAR = Caller(is_loopback=True)
FAR = Caller()
DECODE = ReceivingInstance("decode", "127.0.0.1:7001", "prefill", "tiny")
PREFILL = ReceivingInstance("prefill", "127.0.0.1:7000", "prefill", "tiny")

READERS = {
    "completions": reader_of(CompletionRequest),
    "chat": reader_of(ChatRequest),
    "generate": reader_of(GenerateRequest),
}


def model(*, has_tokenizer: bool = True) -> ServedModel:
    """A model of a small context."""
    return ServedModel(
        tokenizer() if has_tokenizer else None, CONTEXT, VOCABULARY, lambda num_prompt: CONTEXT
    )


def read(kind: str, body: Any) -> Any:
    """A body as the server reads it."""
    return READERS[kind](body if isinstance(body, bytes) else msgspec.json.encode(body))


def asked(
    body: dict[str, Any], kind: str = "completions", caller: Caller = NEAR, place: ReceivingInstance = DECODE
) -> ParsedRequest:
    """The inquiry that a body comes to."""
    return asyncio.run(parse_request(read(kind, body), caller, model(), place))
