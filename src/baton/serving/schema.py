"""The JSON bodies of requests and responses.

A request field that is not named here is accepted and has no effect. UNSUPPORTED lists the fields that would
change the response and that this server cannot honour: they may only have a neutral value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.engine.sampling_params import BIAS_MAX, NUM_ANSWERS_MAX, NUM_LOGPROBS_MAX, PENALTY_MAX
from baton.serving.http import ApiError, bad_field

T = TypeVar("T")

# ---- requests

TOP_LOGPROBS_MAX = 20
"""For chats, as in OpenAI's API."""
NUM_PROMPTS_MAX = 256

COUNT_MAX = 2**31 - 1
"""Larger values do not fit into the commands to ranks."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=COUNT_MAX)]
"""0 or -1: all tokens."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias: TypeAlias = Annotated[float, Meta(ge=-BIAS_MAX, le=BIAS_MAX)]
RoomId: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]
Texts: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=NUM_PROMPTS_MAX)]


def _some_of(*forms: dict[str, Any]) -> Meta:
    """A list of one of these forms; the decoder takes a mixture, which the parser refuses later."""
    return Meta(
        extra_json_schema={"anyOf": [{"type": "array", "minItems": 1, "items": form} for form in forms]}
    )


_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS = {"type": "array", "minItems": 1, "items": _ID}
Prompts: TypeAlias = Annotated[list[str | TokenId | TokenIds], _some_of({"type": "string"}, _ID, _IDS)]
"""Several texts, the token ids of one prompt, or those of several."""
IdLists: TypeAlias = Annotated[list[TokenId | TokenIds], _some_of(_ID, _IDS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None


class RoutedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a router adds: where the KV cache comes from or goes to; lists for several jobs."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: RoomId | list[RoomId] | None = None
    baton: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    """A baton.serving.http.RouterHints from trusted callers; ignored from others."""
    cache_salt: str | None = None
    """Requests with different salts never share a cached prefix."""


class SamplingFields(RoutedFields, frozen=True, kw_only=True):
    """Sampling parameters of OpenAI's API."""

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


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """Fields that other servers of this API accept in addition."""

    model: str | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    return_token_ids: bool | None = None


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Prompts
    max_tokens: PositiveInt | None = None
    echo: bool | None = None
    best_of: Count | None = None
    """Only as equal to n: all completions are returned."""
    logprobs: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only type text is accepted."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat, as the template gets it."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class GenerateParams(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params` of POST /generate: the same parameters under SGLang's names."""

    n: Annotated[int, Meta(ge=1, le=NUM_ANSWERS_MAX)] | None = None
    max_new_tokens: PositiveInt | None = None
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


class GenerateRequest(RoutedFields, frozen=True, kw_only=True):
    """The body of POST /generate; either `text` or `input_ids`."""

    text: str | Texts | None = None
    input_ids: IdLists | None = None
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None


RequestBody: TypeAlias = CompletionRequest | ChatRequest | GenerateRequest


# ---- unsupported fields

_LEAVE = "leave it out"
_FREE = f"output cannot be constrained to a format here; {_LEAVE}"
_ADAPTER = f"adapters are not served; {_LEAVE}"
_TEXT = f"prompts and answers are text or token ids; {_LEAVE}"
_OFF: tuple[Any, ...] = (None, False)
_ABSENT: tuple[Any, ...] = (None, [], {}, "")

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (
        (None, {"type": "text"}),
        f"output cannot be constrained to a format here; use text or {_LEAVE}",
    ),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "structural_tag",
            "json_schema",
            "regex",
            "ebnf",
            "grammar",
        ),
        (_ABSENT, _FREE),
    ),
    "tool_choice": ((None, "none", "auto"), "no call can be forced here; use auto or none"),
    "functions": (_ABSENT, "use tools"),
    "function_call": ((None, "none", "auto"), "no call can be forced here; use auto or none"),
    **dict.fromkeys(("lora_path", "lora_request", "lora_id", "adapter"), (_ABSENT, _ADAPTER)),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor"), (_ABSENT, f"logits cannot be changed; {_LEAVE}")
    ),
    **dict.fromkeys(
        ("audio", "image_data", "audio_data", "video_data", "input_embeds", "prompt_embeds", "input_audio"),
        (_ABSENT, _TEXT),
    ),
    "modalities": ((None, [], ["text"]), f"only text is generated; use text or {_LEAVE}"),
    "web_search_options": (_ABSENT, f"there is no web search; {_LEAVE}"),
    "verbosity": ((None, "medium"), f"use medium or {_LEAVE}"),
    "suffix": ((None, ""), f"prompts are only continued; {_LEAVE}"),
    "use_beam_search": (_OFF, f"there is no beam search; {_LEAVE}"),
    "prompt_logprobs": (_OFF, f"prompts have no log-probabilities here; {_LEAVE}"),
    "return_hidden_states": (_OFF, f"hidden states are not returned; {_LEAVE}"),
    "truncate_prompt_tokens": ((None,), f"cut the prompt yourself, or {_LEAVE}"),
    "chat_template": ((None, ""), f"the model's own template is used; {_LEAVE}"),
    "no_stop_trim": (_OFF, f"stop strings are not part of the output; {_LEAVE}"),
    "include_stop_str_in_output": (_OFF, f"stop strings are not part of the output; {_LEAVE}"),
    "skip_special_tokens": ((None, True), f"special tokens have no text here; use true or {_LEAVE}"),
    "logprob_start_len": ((None, -1), f"prompts have no log-probabilities here; {_LEAVE}"),
}
"""By field: the neutral values, and what to do about any other."""

_Unsupported = msgspec.defstruct("_Unsupported", [(name, Any, None) for name in UNSUPPORTED], frozen=True)
_reader = msgspec.json.Decoder(_Unsupported)


def check_fields(body: bytes) -> None:
    """Refuses unsupported fields; `body` is a JSON object."""
    check_values(msgspec.structs.asdict(_reader.decode(body)))


def check_values(fields: Mapping[str, Any], prefix: str = "") -> None:
    """The same for decoded fields; `prefix` is the path of the object that holds them."""
    for name, (neutral, remedy) in UNSUPPORTED.items():
        value = fields.get(name)
        # Equal values of different types (0 and false) do not mean the same.
        if not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            raise bad_field(f"{prefix}{name}", value, remedy, code="unsupported")


# ---- decoding

_AT = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def reader_of(kind: type[T]) -> Callable[[bytes], T]:
    """A decoder for bodies of one kind; reuse it."""
    decoder = msgspec.json.Decoder(kind)

    def read(body: bytes) -> T:
        try:
            request = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(
                400, f"the body is not JSON ({error}); send a JSON object", code="no_json"
            ) from None
        check_fields(body)
        if getattr(request, "sampling_params", None) is not None:
            check_values(msgspec.json.decode(body)["sampling_params"], "sampling_params.")
        return request

    return read


def _wrong_field(message: str, body: bytes) -> ApiError:
    """The decoder's message, with the field and the value that it refused."""
    match = _AT.match(message)
    assert match is not None
    text, path = match["text"], match["path"] or ""
    param = path.removeprefix(".")
    if missing := _MISSING.match(text):
        param = f"{param}.{missing[1]}".lstrip(".")
        return ApiError(400, f"{param} is missing; give it", param=param, code="missing_field")
    remedy = text.replace("`", "").replace("Expected", "expected").replace("null", "nothing")
    if not param:
        return ApiError(400, f"the body: {remedy}; send a JSON object", code="wrong_type")
    try:
        value = _value_at(msgspec.json.decode(body), path)
    except (LookupError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ApiError(400, f"{param}: {remedy}", param=param, code="wrong_type")
    return bad_field(param, value, remedy, code="wrong_type")


def _value_at(value: Any, path: str) -> Any:
    for name, index in _STEP.findall(path):
        value = value[int(index)] if index else value[name]
    return value


# ---- responses


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion, by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice, or its delta in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The response of /v1/completions, or an event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TokenLogprob(msgspec.Struct, frozen=True):
    """An alternative to a sampled token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True):
    """A sampled token with its most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice, by token."""

    content: list[ChatLogprob]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The generated message."""

    content: str
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New content of a choice."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct, frozen=True):
    """One choice in a stream event."""

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
    """`meta_info` of /generate."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[tuple[float, int, str]] | UnsetType = UNSET
    output_top_logprobs: list[list[tuple[float, int, str]]] | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True):
    """One result of /generate; stream events hold the whole text so far."""

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


class HealthBody(msgspec.Struct, frozen=True):
    """The response of /health."""

    status: str
    stage: str


class DrainBody(msgspec.Struct, frozen=True):
    """The response of /drain."""

    is_draining: bool
    num_open: int
