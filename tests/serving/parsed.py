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
    ServedModel,
    parse_request,
    reader_of,
)

CONTEXT = 64
VOCABULARY = 432
HIDDEN = 3
NEAR = Caller(is_loopback=True)
FAR = Caller()
PREFILL = {"role": "prefill", "address": "127.0.0.1:7000"}

READERS = {
    "completions": reader_of(CompletionRequest),
    "chat": reader_of(ChatRequest),
    "generate": reader_of(GenerateRequest),
}


def model(*, has_tokenizer: bool = True, **more: Any) -> ServedModel:
    """A model of a small context, at a decode instance unless `more` says otherwise."""
    fields = {
        "name": "tiny",
        "tokenizer": tokenizer() if has_tokenizer else None,
        "context_max": CONTEXT,
        "vocab_size": VOCABULARY,
        "num_tokens_max": lambda num_prompt: CONTEXT,
        "hidden_size": HIDDEN,
        "role": "decode",
        "address": "127.0.0.1:7001",
    }
    return ServedModel(**{**fields, **more})


def read(kind: str, body: Any) -> Any:
    """A body as the server reads it."""
    return READERS[kind](body if isinstance(body, bytes) else msgspec.json.encode(body))


def asked(
    body: dict[str, Any], kind: str = "completions", caller: Caller = NEAR, **more: Any
) -> ParsedRequest:
    """The inquiry that a body comes to."""
    return asyncio.run(parse_request(read(kind, body), caller, model(**more)))
