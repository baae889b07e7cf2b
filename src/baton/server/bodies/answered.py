"""The bodies of answers, and of the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """What of a prompt was not computed."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """How many tokens a request was; prompts count once, whatever their number of answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """By token of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer to one prompt, or what it has grown by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The answer to /v1/completions, or an event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat that may have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of a chat, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """By token of an answer."""

    content: list[ChatLogprob]


class AssistantMessage(msgspec.Struct, frozen=True):
    """What was answered."""

    content: str
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer has grown by."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct, frozen=True):
    """Which answer has grown, and why it ended if it did."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """An event of a chat's stream."""

    id: str
    created: int
    model: str
    choices: list[DeltaChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class GenerateMeta(msgspec.Struct, frozen=True):
    """What /generate tells beside the text."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[tuple[float, int, str]] | UnsetType = UNSET
    output_top_logprobs: list[list[tuple[float, int, str]]] | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True):
    """One answer of /generate; those of its stream hold all of the answer so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """One served model."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "baton"
    root: str = ""
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, frozen=True):
    """Whether requests can be served, and if not, how far it is."""

    status: str
    stage: str


class Drained(msgspec.Struct, frozen=True):
    """Nothing new is taken; so many requests are left."""

    is_draining: bool
    num_open: int
