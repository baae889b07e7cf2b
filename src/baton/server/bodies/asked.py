"""The bodies of requests; a field that is not named here is accepted and has no effect.

Fields that would change the answer and that nothing here can honour are named all the same, in
baton.server.bodies.refused, which says no to them.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from baton.engine.sampling_params import BIAS_MAX, NUM_ANSWERS_MAX, NUM_LOGPROBS_MAX, PENALTY_MAX

TOP_LOGPROBS_MAX = 20
"""Of a chat, as OpenAI has it."""
NUM_PROMPTS_MAX = 256

COUNT_MAX = 2**31 - 1
"""More than anything here can be; what is larger does not fit into the orders to ranks."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Some: TypeAlias = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=COUNT_MAX)]
"""0 or -1: all tokens."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias: TypeAlias = Annotated[float, Meta(ge=-BIAS_MAX, le=BIAS_MAX)]
Room: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Texts: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=NUM_PROMPTS_MAX)]


def _some_of(*forms: dict[str, Any]) -> Meta:
    """A list of one of these forms, where the reader takes a mixture and it is looked at afterwards."""
    return Meta(
        extra_json_schema={"anyOf": [{"type": "array", "minItems": 1, "items": form} for form in forms]}
    )


_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS = {"type": "array", "minItems": 1, "items": _ID}
Prompts: TypeAlias = Annotated[list[str | TokenId | TokenIds], _some_of({"type": "string"}, _ID, _IDS)]
"""Several texts, the token ids of one prompt, or those of several."""
IdLists: TypeAlias = Annotated[list[TokenId | TokenIds], _some_of(_ID, _IDS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has beside the answer."""

    include_usage: bool | None = None


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """What a router adds: where the prompt's cache comes from or goes to, by job where there are several."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None
    baton: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    """A baton.web.private.Private from whoever may send one, anything at all from others."""
    cache_salt: str | None = None
    """Requests with another salt never share a prefix."""


class Sampled(Routed, frozen=True, kw_only=True):
    """How answers are sampled, as OpenAI names it."""

    n: Annotated[int, Meta(ge=1, le=NUM_ANSWERS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Extended(Sampled, frozen=True, kw_only=True):
    """What other servers of this API take beside it."""

    model: str | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    return_token_ids: bool | None = None


class CompletionRequest(Extended, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Prompts
    max_tokens: Some | None = None
    echo: bool | None = None
    best_of: Count | None = None
    """The same as n: all answers are told."""
    logprobs: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is taken."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat, as its template gets it."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Extended, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Some | None = None
    max_completion_tokens: Some | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class GenerateParams(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params` of POST /generate: the same wishes under other names."""

    n: Annotated[int, Meta(ge=1, le=NUM_ANSWERS_MAX)] | None = None
    max_new_tokens: Some | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    sampling_seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


class GenerateRequest(Routed, frozen=True, kw_only=True):
    """The body of POST /generate; either `text` or `input_ids`."""

    text: str | Texts | None = None
    input_ids: IdLists | None = None
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None


Body: TypeAlias = CompletionRequest | ChatRequest | GenerateRequest
