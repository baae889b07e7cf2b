"""OpenAI's API, and SGLang's /generate, as functions: from bodies to jobs, and from choices to responses.

A field that is not named here is refused. UNSUPPORTED lists the fields of OpenAI, vLLM and SGLang that would
change the response and that this server cannot honour: they may only have a neutral value. IGNORED lists
fields that do not change the text.

The n choices of a prompt are one job: one prefill, one hand-over, and the decode forks. The index of a choice
is the prompt's index times n, plus the choice's number among the n. A request that resumes an earlier attempt
has one job for each unfinished choice, in the order listed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import isfinite
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.engine.commands import SampledToken
from baton.engine.grammar import (
    call_grammar,
    choice_grammar,
    json_grammar,
    regex_grammar,
    text_grammar,
)
from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff
from baton.engine.sampling_params import (
    BIAS_MAX,
    NUM_ANSWERS_MAX,
    NUM_LOGPROBS_MAX,
    PENALTY_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SamplingParams,
    check_params,
)
from baton.engine.tokenizer import AnswerText, Tokenizer
from baton.errors import ConfigError
from baton.serving.http import VALUE_CHARACTERS_MAX, ApiError, Caller, RouterHints, bad_field
from baton.serving.tool_calls import (
    CallForm,
    ToolCall,
    ToolCallParser,
    find_form,
    forced_form,
    schemas_of,
)

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
TokenSequence = tuple[int, ...]
TokenName = tuple[str, list[int] | None]

TOO_LONG = "context_length_exceeded"
NUM_CHOICES_MAX = 256
LOGPROB_MIN = -9999.0
"""In place of minus infinity, which JSON does not have."""
_BROKEN = "\ufffd"


# ---- bodies of requests

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
_ROWS = {"type": "array", "minItems": 1, "items": {"type": "number"}}
Embeddings: TypeAlias = Annotated[
    list[list[float | list[float]]], _some_of(_ROWS, {"type": "array", "minItems": 1, "items": _ROWS})
]
"""The input embeddings of one prompt, a row per token, or those of several prompts."""
IdLists: TypeAlias = Annotated[list[TokenId | TokenIds], _some_of(_ID, _IDS)]


# Fields that a router adds: where the KV cache comes from or goes to, in lists for several jobs, and `baton`,
# a RouterHints from trusted callers that is ignored from others. `data_parallel_rank` (newer name:
# `routed_dp_rank`) is the DP group of the instance that reads it, `disagg_prefill_dp_rank` that of prefill.
Hosts: TypeAlias = str | list[str]
Ports: TypeAlias = Port | list[Port | None]
Rooms: TypeAlias = RoomId | list[RoomId]
_NULL: Any = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`json_schema` of a response format."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """The output satisfies the schema in any case."""


class OutputFormat(msgspec.Struct, frozen=True):
    """`response_format`."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """`structured_outputs` as in vLLM; exactly one of its fields."""

    json: dict[str, Any] | str | None = None
    """A schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    """In Lark or GBNF."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that have one name in OpenAI's and SGLang's API."""

    n: Annotated[int, Meta(ge=1, le=NUM_ANSWERS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_MIN, le=REPETITION_MAX)] | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    """False: special tokens have their text in the output."""


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """Fields common to OpenAI's requests, and extensions that other servers accept too."""

    model: str | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    bootstrap_host: Hosts | None = None
    bootstrap_port: Ports | None = None
    bootstrap_room: Rooms | None = None
    data_parallel_rank: Count | None = None
    routed_dp_rank: Count | None = None
    disagg_prefill_dp_rank: Count | None = None
    baton: msgspec.Raw = _NULL
    cache_salt: str | None = None
    """Requests with different salts never share a cached prefix."""


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Prompts
    max_tokens: Count | None = None
    """0 only with echo."""
    echo: bool | None = None
    """With logprobs, the prompt has log-probabilities too."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own around a text; true where it is not given."""
    best_of: Count | None = None
    """Only as equal to n: all completions are returned."""
    logprobs: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only type text is accepted."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat, as the template gets it."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


ToolChoice: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": ["none", "auto", "required"]})]


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | dict[str, Any] | None = None
    """An object names the function to call."""
    parallel_tool_calls: bool | None = None
    """False: only the first call is returned, as in vLLM."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class GenerateParams(SamplingFields, frozen=True, kw_only=True):
    """`sampling_params` of POST /generate: the same parameters under SGLang's names."""

    max_new_tokens: PositiveInt | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /generate; one of `text`, `input_ids` and `input_embeds`."""

    text: str | Texts | None = None
    input_ids: IdLists | None = None
    input_embeds: Embeddings | None = None
    sampling_params: GenerateParams | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=NUM_LOGPROBS_MAX)] | None = None
    bootstrap_host: Hosts | None = None
    bootstrap_port: Ports | None = None
    bootstrap_room: Rooms | None = None
    data_parallel_rank: Count | None = None
    routed_dp_rank: Count | None = None
    disagg_prefill_dp_rank: Count | None = None
    baton: msgspec.Raw = _NULL
    cache_salt: str | None = None


RequestBody: TypeAlias = CompletionRequest | ChatRequest | GenerateRequest


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize; either `prompt` or `messages`, with the fields that chats have for them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# ---- fields without an effect, and unsupported ones

_HARMLESS = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction
    include_obfuscation
    priority request_id session_id include_reasoning spaces_between_special_tokens early_stopping
    media_io_kwargs mm_processor_kwargs
    rid model separate_reasoning stream_reasoning require_reasoning stream_interval return_text_in_logprobs
    log_metrics no_logs custom_labels label conversation_id routing_key bootstrap_pair_key decode_tp_size
"""
IGNORED = frozenset(_HARMLESS.split())
"""Only where a body does not have them as fields of its own, as completions have `model`."""

_LEAVE = "leave it out"
_FORMATS = """
    guided_json guided_regex guided_choice guided_grammar structural_tag json_schema regex ebnf grammar
"""
_FORMAT = "use response_format or structured_outputs"
_ADAPTER = f"adapters are not served; {_LEAVE}"
_MEDIA = "audio image_data audio_data video_data prompt_embeds input_audio"
_TEXT = f"prompts and answers are text or token ids; {_LEAVE}"
_OFF: tuple[Any, ...] = (None, False)
_ABSENT: tuple[Any, ...] = (None, [], {}, "")

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(_FORMATS.split(), (_ABSENT, _FORMAT)),
    "functions": (_ABSENT, "use tools"),
    "function_call": ((None, "none", "auto"), "use tool_choice"),
    **dict.fromkeys(("lora_path", "lora_request", "lora_id", "adapter"), (_ABSENT, _ADAPTER)),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor"), (_ABSENT, f"logits cannot be changed; {_LEAVE}")
    ),
    **dict.fromkeys(_MEDIA.split(), (_ABSENT, _TEXT)),
    "input_embeds": (_ABSENT, "send it to /generate"),
    "modalities": ((None, [], ["text"]), f"only text is generated; use text or {_LEAVE}"),
    "web_search_options": (_ABSENT, f"there is no web search; {_LEAVE}"),
    "verbosity": ((None, "medium"), f"use medium or {_LEAVE}"),
    "suffix": ((None, ""), f"prompts are only continued; {_LEAVE}"),
    "use_beam_search": (_OFF, f"there is no beam search; {_LEAVE}"),
    "prompt_logprobs": (_OFF, "use echo and logprobs of /v1/completions"),
    "return_hidden_states": (_OFF, f"hidden states are not returned; {_LEAVE}"),
    "truncate_prompt_tokens": ((None,), f"cut the prompt yourself, or {_LEAVE}"),
    "chat_template": ((None, ""), f"the model's own template is used; {_LEAVE}"),
    "no_stop_trim": (_OFF, f"stop strings are not part of the output; {_LEAVE}"),
    "include_stop_str_in_output": (_OFF, f"stop strings are not part of the output; {_LEAVE}"),
    "logprob_start_len": ((None, -1), "use echo and logprobs of /v1/completions"),
    **dict.fromkeys(
        ("allowed_token_ids", "bad_words"), (_ABSENT, f"use logit_bias to rule tokens in or out, or {_LEAVE}")
    ),
    "stop_regex": (_ABSENT, f"use stop or stop_token_ids, or {_LEAVE}"),
    "length_penalty": ((None, 1, 1.0), f"there is no beam search; use 1 or {_LEAVE}"),
    "echo": (_OFF, f"only /v1/completions repeats the prompt; {_LEAVE}"),
    "add_special_tokens": (_OFF, f"the chat template writes special tokens itself; use false or {_LEAVE}"),
    "documents": (_ABSENT, "give them as documents in chat_template_kwargs"),
    "extra_key": (_ABSENT, "use cache_salt"),
    "session_params": (_ABSENT, f"no sessions are kept; {_LEAVE}"),
    "background": (_OFF, f"requests are answered at once; {_LEAVE}"),
    "continuous_usage_stats": (_OFF, f"the usage comes at the end of a stream; {_LEAVE}"),
    "kv_transfer_params": (_ABSENT, "a hand-over is named by bootstrap_host, bootstrap_port, bootstrap_room"),
    **dict.fromkeys(("vllm_xargs", "custom_params"), (_ABSENT, f"there are no plugins here; {_LEAVE}")),
    **dict.fromkeys(
        ("thinking_token_budget", "repetition_detection", "logprob_token_ids", "token_ids_logprob"),
        (_ABSENT, f"it is not supported; {_LEAVE}"),
    ),
    **dict.fromkeys(
        ("return_tokens_as_token_ids", "return_routed_experts", "return_entropy", "return_bytes"),
        (_OFF, f"it is not supported; {_LEAVE}"),
    ),
}
"""By field: the neutral values, and what to do about any other."""


def check_fields(fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct], prefix: str = "") -> None:
    """Refuses what would be dropped otherwise; `prefix` is the path of the object that holds the fields."""
    for name, raw in fields.items():
        if name in kind.__struct_fields__ or name in IGNORED:
            continue
        path = f"{prefix}{name[:VALUE_CHARACTERS_MAX]}"
        if name not in UNSUPPORTED:
            text = f"{path!a} is not a field of this API; leave it out, or see GET /openapi.json"
            raise ApiError(400, text, param=path, code="unknown_field")
        neutral, remedy = UNSUPPORTED[name]
        value = msgspec.json.decode(raw)
        # Equal values of different types (0 and false) do not mean the same.
        if not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            raise bad_field(path, value, remedy, code="unsupported")


# ---- decoding

_AT = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_NESTED: Mapping[str, type[msgspec.Struct]] = {
    "sampling_params": GenerateParams,
    "stream_options": StreamOptions,
    "response_format": OutputFormat,
    "structured_outputs": StructuredOutputs,
}
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def reader_of(kind: type[StructT]) -> Callable[[bytes], StructT]:
    """A decoder for bodies of one kind; reuse it."""
    decoder = msgspec.json.Decoder(kind)

    def read(body: bytes) -> StructT:
        try:
            request = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(
                400, f"the body is not JSON ({error}); send a JSON object", code="no_json"
            ) from None
        fields = _members.decode(body)
        check_fields(fields, kind)
        for name, struct in _NESTED.items():
            if getattr(request, name, None) is not None:
                check_fields(_members.decode(fields[name]), struct, f"{name}.")
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
    remedy = text.replace("`", "").replace("Expected", "expected")
    remedy = remedy.replace(" | null", "").replace("null", "nothing")
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


# ---- from a body to jobs

MAX_TOKENS_DEFAULT = {CompletionRequest: 16, GenerateRequest: 128}
"""Where the request does not set max_tokens; a chat has as many as fit."""

_INLINE_CHARACTERS_MAX = 2000
"""Longer texts are tokenized on a thread, so that the event loop goes on serving streams."""
_TOKEN_CHARACTERS_MAX = 256
"""No token is longer: a text of more than so many times the context need not be tokenized to be refused."""
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a chat template raises when messages are not as it expects."""
_RESERVED_TEMPLATE_ARGUMENTS = {
    "conversation",
    "messages",
    "tokenize",
    "chat_template",
    "return_tensors",
    "return_dict",
}
_ID_PREFIXES = {CompletionRequest: "cmpl-", ChatRequest: "chatcmpl-", GenerateRequest: "gen-"}
_PROMPT_FIELDS = {CompletionRequest: "prompt", ChatRequest: "messages", GenerateRequest: "text"}
ROLES = ("system", "developer", "user", "assistant", "tool")
_ONE_PROMPT = "give one of text, input_ids and input_embeds"
_FIELD = re.compile(r"(\w+) is ")
_FIELD_NAMES = {"stop_ids": "stop_token_ids"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A running instance and its model, as far as requests and responses need them."""

    name: str
    """In the API."""
    tokenizer: Tokenizer | None
    context_max: int
    vocab_size: int
    num_tokens_max: Callable[[int], int]
    """The most tokens of prompt and completion together, for a prompt of so many tokens."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """What a request that leaves a sampling parameter out gets."""
    eos_ids: frozenset[int] = frozenset()
    hidden_size: int = 0
    role: str = "both"
    address: str = ""
    """Of the instance's coordinator, as host:port."""
    first_token: str = "prefill"
    """prefill or decode: which side's first token is streamed."""
    num_dp_groups: int = 1
    tool_call_parser: str = "auto"
    """One of baton.serving.tool_calls.PARSERS."""
    _names: dict[int, TokenName] = field(default_factory=dict)

    async def encode(self, text: str, param: str, add_special: bool = True) -> TokenSequence:
        tokenizer = self._tokenizer(param)
        self._check_characters(len(text), param)
        return tuple(await _off_loop(lambda: tokenizer.encode(text, add_special), len(text)))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> TokenSequence:
        """Applies the chat template; `options` are its other arguments."""
        tokenizer = self._tokenizer("messages")
        if not tokenizer.has_chat_template:
            text = "the model has no chat template; send the prompt to /v1/completions"
            raise ApiError(400, text, param="messages", code="unsupported")
        if options.get("tools") and not tokenizer.has_template_word("tools"):
            raise bad_field(
                "tools", options["tools"], "the model's chat template does not support tools; leave them out"
            )
        num_characters = sum(len(str(message.get("content", ""))) for message in messages)
        self._check_characters(num_characters, "messages")
        arguments = dict(options)
        is_open = bool(arguments.pop("add_generation_prompt", True))
        try:
            return tuple(
                await _off_loop(lambda: tokenizer.chat(messages, is_open, arguments), num_characters)
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from None
        except _TEMPLATE_ERRORS as error:
            text = f"the chat template cannot use the messages ({type(error).__name__}: {error}); change them"
            raise ApiError(400, text, param="messages") from None

    async def check_grammar(self, grammar: str, param: str) -> None:
        tokenizer = self._tokenizer(param)
        try:
            # On a thread: a large schema takes long, and the first grammar needs the whole vocabulary.
            await asyncio.to_thread(tokenizer.check_grammar, grammar, self.vocab_size, self.eos_ids)
        except ConfigError as error:
            raise _bad_format(param, error) from None

    def has_template_word(self, word: str) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_template_word(word)

    def call_form(self) -> CallForm | None:
        """The form of the model's tool calls, where it is known."""
        return find_form(self.tool_call_parser, self.has_template_word)

    def special_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """The special tokens among these texts."""
        special = {} if self.tokenizer is None else self.tokenizer.special
        return tuple(token for token, text in special.items() if text in texts)

    def tag(self, text: str) -> int | str:
        """A tag as the one token that it is in the vocabulary, or as text."""
        tokenizer = self.tokenizer
        tokens = [] if tokenizer is None else tokenizer.encode(text, add_special=False)
        is_token = len(tokens) == 1 and tokenizer and tokenizer.decode(tokens, has_special=True) == text
        return tokens[0] if is_token else text

    def has_template_role(self, role: str) -> bool:
        """Whether the chat template names a role that OpenAI's API does not have."""
        return role.isidentifier() and any(map(self.has_template_word, (f"'{role}'", f'"{role}"')))

    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        request: CompletionRequest | ChatRequest
        if body.prompt is not None:
            request = CompletionRequest(prompt=body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            if body.add_special_tokens:
                raise bad_field("add_special_tokens", True, UNSUPPORTED["add_special_tokens"][1])
            shared = set(ChatRequest.__struct_fields__) & set(TokenizeRequest.__struct_fields__)
            request = ChatRequest(**{name: getattr(body, name) for name in shared})
        (tokens,) = await _read_prompts(request, self)
        tokenizer = self._tokenizer("prompt")
        spellings = [tokenizer.spelling(token) for token in tokens] if body.return_token_strs else None
        return Tokenized(len(tokens), self.context_max, list(tokens), spellings)

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        tokenizer, tokens = self._tokenizer("tokens"), self.check_ids(body.tokens, "tokens")
        return Detokenized(await _off_loop(lambda: tokenizer.decode(tokens, has_special=True), len(tokens)))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    def token_name(self, token: int) -> TokenName:
        """For log-probabilities: a token's text, or its spelling where it has none, and its bytes."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = _token_name(self.tokenizer, token)
        return name

    def check_ids(self, tokens: Sequence[int], param: str) -> TokenSequence:
        """Token ids as a client sent them."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise bad_field(param, wrong, f"give token ids from 0 to {self.vocab_size - 1}")
        return tuple(tokens)

    def _tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            text = f"{param}: the model has no tokenizer; send token ids to /v1/completions"
            raise ApiError(400, text, param=param, code="unsupported")
        return self.tokenizer

    def _check_characters(self, num_characters: int, param: str) -> None:
        if num_characters > _TOKEN_CHARACTERS_MAX * self.context_max:
            text = f"{param} has {num_characters} characters, far more than the {self.context_max} tokens "
            raise ApiError(400, f"{text}of the context; send less", param=param, code=TOO_LONG)


async def _off_loop(work: Callable[[], T], num_characters: int) -> T:
    return work() if num_characters <= _INLINE_CHARACTERS_MAX else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its n choices, or the rest of one choice."""

    request: EngineRequest
    prompt_index: int


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request of a client."""

    id: str
    created: int
    body: RequestBody
    jobs: tuple[Job, ...]
    n: int
    prompts: tuple[TokenSequence, ...]
    hints: RouterHints

    @property
    def is_prefill(self) -> bool:
        """Whether its KV cache is handed over: it is answered when the hand-overs are settled."""
        return any(isinstance(job.request.handoff, OutboundHandoff) for job in self.jobs)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def is_echo_only(self) -> bool:
        """Whether nothing but the prompt is wanted; the engine samples a token all the same."""
        return isinstance(self.body, CompletionRequest) and self.body.max_tokens == 0

    @property
    def has_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        options = self.body.stream_options if isinstance(self.body, OpenAIFields) else None
        return bool(options and options.include_usage)

    @property
    def has_ids(self) -> bool:
        """Whether token ids are returned with the text."""
        return isinstance(self.body, OpenAIFields) and bool(self.body.return_token_ids)

    @property
    def resumed(self) -> dict[int, TokenSequence]:
        """By resumed choice: the tokens that the client already has."""
        return {choice.index: choice.tokens for choice in self.hints.resume}

    def choices(self) -> list[int]:
        """The choices that are generated here."""
        if self.hints.resume:
            return [choice.index for choice in self.hints.resume]
        return [job.prompt_index * self.n + index for job in self.jobs for index in range(self.n)]


def read_hints(body: RequestBody, caller: Caller) -> RouterHints:
    """What a router adds to a body; nothing from callers that are not trusted."""
    if not caller.is_trusted or bytes(body.baton) == b"null":
        return RouterHints()
    try:
        return msgspec.json.decode(body.baton, type=RouterHints)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"baton: {error}; leave it to the router", param="baton") from None


class ClaimedId(msgspec.Struct, frozen=True):
    """Of a body that is refused: the id that a router gave its request."""

    baton: RouterHints = RouterHints()


def claimed_id(raw: bytes, caller: Caller) -> str:
    """The id of a request whose body cannot be read as a whole; empty without a trusted router."""
    try:
        return msgspec.json.decode(raw, type=ClaimedId).baton.id if caller.is_trusted else ""
    except (msgspec.DecodeError, RecursionError):
        return ""


async def parse_request(body: RequestBody, caller: Caller, model: ServedModel) -> ParsedRequest:
    """Checks a body and turns it into jobs; an ApiError where it cannot be served."""
    hints = read_hints(body, caller)
    for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        if getattr(body, name) is not None and not caller.is_trusted:
            text = (
                f"{name} is accepted only from this machine or with the router's key; a stock PD router on "
                "another host sends the key that `baton route --print-key` prints, other clients leave it out"
            )
            raise ApiError(403, text, param=name, code="room_not_allowed")
    if not hints.id:  # a router found this instance by its fingerprint; the name may be its peer's
        check_model(getattr(body, "model", None), model.name, is_handed_over=body.bootstrap_room is not None)
    room = body.bootstrap_room
    if isinstance(room, list):
        room = room[0] if room else 0
    # The room seeds both sides of a hand-over, so that they sample alike.
    params = sampling_params(body, room or secrets.randbits(63), model.defaults)
    if params.stop and model.tokenizer is None:
        raise bad_field("stop", params.stop, "the model has no tokenizer; use stop_token_ids")
    format_field, grammar = _grammar(body, model)
    if grammar:
        await model.check_grammar(grammar, format_field)
        params = msgspec.structs.replace(params, grammar=grammar)
    if form := _call_form(body, model):
        params = msgspec.structs.replace(params, shown_special_ids=model.special_ids(form.all_tags))
    embeddings = _read_embeddings(body, model)
    # Tokens whose embeddings are given only count.
    prompts = [(0,) * (len(raw) // (4 * model.hidden_size)) for raw in embeddings]
    prompts = prompts or await _read_prompts(body, model)
    if len(prompts) * params.n > NUM_CHOICES_MAX:
        text = f"{len(prompts)} prompts with n {params.n}: at most {NUM_CHOICES_MAX} choices in a request"
        raise ApiError(400, text, param="n")
    try:
        counted = msgspec.structs.replace(params, max_tokens=params.max_tokens or 2**31)
        check_params(counted, model.vocab_size)
    except ConfigError as error:
        match = _FIELD.match(str(error))
        param = _FIELD_NAMES.get(match[1], match[1]) if match else None
        raise ApiError(400, str(error), param=param) from None
    return ParsedRequest(
        id=hints.id or f"{_ID_PREFIXES[type(body)]}{secrets.token_hex(16)}",
        created=hints.created or int(time.time()),
        body=body,
        jobs=tuple(_make_jobs(body, params, prompts, embeddings, hints, model)),
        n=params.n,
        prompts=tuple(prompts),
        hints=hints,
    )


def check_model(wanted: str | None, served: str, *, is_handed_over: bool = False) -> None:
    """Raises an ApiError for a name that is not served.

    A stock PD router sends one name to both sides, which may serve the model under two; the hand-over checks
    that it is the same model.
    """
    if wanted is None or wanted in (served, served.rstrip("/").rpartition("/")[2]):
        return
    if wanted.startswith(f"{served}:"):
        raise bad_field("model", wanted, f"adapters are not served; use {served!a}", code="unsupported")
    if is_handed_over:
        return
    text = f"the model {wanted[:80]!a} is not served here; use {served!a}"
    raise ApiError(404, text, param="model", code="model_not_found")


# ---- sampling parameters


_SHARED = set(SamplingFields.__struct_fields__) & set(SamplingParams.__struct_fields__)


def sampling_params(body: RequestBody, seed: int, defaults: SamplingParams) -> SamplingParams:
    """The parameters of every choice; `seed` where the body has none, max_tokens 0 where it sets none."""
    given: OpenAIFields | GenerateParams
    prompt_logprobs = None
    match body:
        case CompletionRequest():
            if body.best_of not in (None, body.n or 1):
                remedy = f"choices are not ranked; use n, which is {body.n or 1}"
                raise bad_field("best_of", body.best_of, remedy)
            if body.max_tokens == 0 and not body.echo:
                raise bad_field("max_tokens", 0, "ask for at least 1, or set echo to true")
            max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
            given, own = body, (body.seed, body.min_tokens, max_tokens, body.logprobs)
            prompt_logprobs = body.logprobs if body.echo else None
        case ChatRequest():
            if body.top_logprobs is not None and not body.logprobs:
                raise bad_field("top_logprobs", body.top_logprobs, "set logprobs to true too")
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = body.max_completion_tokens or body.max_tokens
            given, own = body, (body.seed, body.min_tokens, max_tokens, logprobs)
        case GenerateRequest():
            given = params = body.sampling_params or GenerateParams()
            logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
            own = (params.sampling_seed, params.min_new_tokens, params.max_new_tokens, logprobs)
    values: dict[str, Any] = {name: getattr(given, name) for name in _SHARED}
    values |= zip(("seed", "min_tokens", "max_tokens", "logprobs"), own, strict=True)
    values |= {
        "top_k": None if given.top_k is None else max(0, given.top_k),
        "logit_bias": _bias(
            given.logit_bias, "logit_bias" if given is body else "sampling_params.logit_bias"
        ),
        "stop": (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ()),
        "stop_ids": tuple(given.stop_token_ids or ()),
        "prompt_logprobs": prompt_logprobs,
    }
    absent = {"seed": seed, "max_tokens": 0}
    given_values = {name: value for name, value in values.items() if value is not None}
    return msgspec.structs.replace(defaults, **{**absent, **given_values})


def _bias(bias: Mapping[str, float] | None, param: str) -> dict[int, float]:
    wrong = next((key for key in bias or () if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if wrong is not None:
        raise ApiError(400, f"{param} has the key {wrong[:20]!a}: give token ids", param=param)
    return {int(key): value for key, value in (bias or {}).items()}


# ---- structured outputs

_JSON_OBJECT = {"type": "object"}


def _bad_format(param: str, problem: object) -> ApiError:
    return ApiError(400, f"{param}: {problem}; correct it or leave it out", param=param)


def _grammar(body: RequestBody, model: ServedModel) -> tuple[str, str]:
    """The field that gives the output a format, and the grammar of it; empty where none does."""
    asked = list(_formats(body, model))
    if len(asked) > 1:
        raise _bad_format(asked[1][0], f"the output has a format by {asked[0][0]} already")
    for param, make in asked:
        try:
            return param, make()
        except (ConfigError, ValueError) as error:
            raise _bad_format(param, error) from None
    return "", ""


def _formats(body: RequestBody, model: ServedModel) -> Iterator[tuple[str, Callable[[], str]]]:
    """Each field that gives the output a format, and what makes its grammar."""
    options: GenerateParams | StructuredOutputs | None
    if isinstance(body, GenerateRequest):
        options, path = body.sampling_params, "sampling_params"
    else:
        options, path = body.structured_outputs, "structured_outputs"
        yield from _response_formats(body.response_format)
    for name, make in _MAKERS.items():
        if (value := getattr(options, name, None)) not in (None, False):
            yield f"{path}.{name}", partial(make, value)
    if isinstance(body, ChatRequest) and body.tool_choice not in (None, "none", "auto"):
        yield "tool_choice", partial(_call_grammar, body, model)


def _response_formats(given: OutputFormat | None) -> Iterator[tuple[str, Callable[[], str]]]:
    match given:
        case None | OutputFormat("text"):
            return
        case OutputFormat("json_object"):
            yield "response_format", partial(json_grammar, _JSON_OBJECT)
        case OutputFormat("json_schema", NamedSchema(schema)):
            yield "response_format", partial(json_grammar, schema)
        case OutputFormat("json_schema"):
            text = "response_format.json_schema is missing; give it"
            raise ApiError(400, text, param="response_format.json_schema", code="missing_field")
        case _:
            remedy = "use text, json_object or json_schema"
            raise bad_field("response_format.type", given.type, remedy, code="unsupported")


def _json_text(schema: object) -> str:
    return json_grammar(msgspec.json.decode(schema) if isinstance(schema, str) else schema)


_MAKERS: Mapping[str, Callable[[Any], str]] = {
    "json": _json_text,
    "json_object": lambda is_wanted: json_grammar(_JSON_OBJECT),
    "json_schema": _json_text,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": text_grammar,
    "ebnf": text_grammar,
}
"""By field of `structured_outputs` or, in /generate, of `sampling_params`."""


def _call_grammar(body: ChatRequest, model: ServedModel) -> str:
    """The calls that `tool_choice` forces."""
    if isinstance(body.tool_choice, str) and body.tool_choice != "required":
        raise bad_field("tool_choice", body.tool_choice, "use none, auto, required, or name a function")
    form = _call_form(body, model)
    functions: dict[str, object] = {}
    for index, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"tools[{index}] has no function with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ConfigError(f"tools[{index}].function.parameters is not the schema of an object")
        functions[function["name"]] = {"type": "object", **parameters}
    if not functions:
        raise ConfigError("there are no tools")
    if isinstance(body.tool_choice, dict):
        chosen = body.tool_choice.get("function")
        name = chosen.get("name") if isinstance(chosen, dict) else None
        if name not in functions:
            raise ConfigError(f"{name!a} is not the name of one of the tools")
        functions = {name: functions[name]}
    is_parallel = body.tool_choice == "required" and body.parallel_tool_calls is not False
    if form is None:
        raise ConfigError("tool calls are not parsed here (--tool-call-parser none), so none can be forced")
    if form.bare:
        return call_grammar(functions, "parameters", "", "", is_parallel=is_parallel)
    ((begin, end),) = form.tags.items()
    return call_grammar(functions, "arguments", model.tag(begin), model.tag(end), is_parallel=is_parallel)


# ---- prompts


async def _read_prompts(body: RequestBody, model: ServedModel) -> list[TokenSequence]:
    match body:
        case ChatRequest():
            options = _template_options(body)
            messages = [
                _template_message(message, index, model) for index, message in enumerate(body.messages)
            ]
            return [await model.encode_chat(messages, options)]
        case CompletionRequest():
            return await _texts_or_ids(body.prompt, "prompt", model, body.add_special_tokens is not False)
        case GenerateRequest():
            if (body.text is None) == (body.input_ids is None):
                raise ApiError(400, _ONE_PROMPT, param="text")
            if body.text is not None:
                return await _texts_or_ids(body.text, "text", model)
            return await _texts_or_ids(body.input_ids, "input_ids", model)


def _read_embeddings(body: RequestBody, model: ServedModel) -> list[bytes]:
    """By prompt: its input embeddings in float32; none where prompts are texts or ids."""
    if not isinstance(body, GenerateRequest) or body.input_embeds is None:
        return []
    if body.text is not None or body.input_ids is not None:
        raise ApiError(400, _ONE_PROMPT, param="input_embeds")
    given: list[Any] = body.input_embeds
    are_many = bool(given and given[0]) and isinstance(given[0][0], list)
    encoded = []
    for rows in given if are_many else [given]:
        values = array("f")
        for row in rows:
            if not isinstance(row, list) or len(row) != model.hidden_size or list in map(type, row):
                remedy = f"give a row of {model.hidden_size} numbers per token"
                raise bad_field("input_embeds", row, remedy)
            values.extend(row)
        if not values or not all(map(isfinite, values)):
            raise bad_field("input_embeds", rows, "give at least one row, of numbers that float32 holds")
        encoded.append(values.tobytes())
    return encoded


async def _texts_or_ids(
    value: Any, param: str, model: ServedModel, add_special: bool = True
) -> list[TokenSequence]:
    if isinstance(value, str):
        return [await model.encode(value, param, add_special)]
    if not value:
        raise bad_field(param, value, "give at least one prompt")
    kinds = {type(item) for item in value}
    if len(kinds) > 1:
        raise bad_field(param, value, "give texts, or token ids, or lists of token ids, not a mixture")
    if kinds == {int}:
        return [model.check_ids(value, param)]
    if len(value) > NUM_PROMPTS_MAX:
        raise ApiError(400, f"{param} has {len(value)} prompts; send at most {NUM_PROMPTS_MAX}", param=param)
    if kinds == {list}:
        return [model.check_ids(ids, param) for ids in value]
    return [await model.encode(text, param, add_special) for text in value]


def _template_message(message: ChatMessage, index: int, model: ServedModel) -> dict[str, Any]:
    """A message as templates expect it: content is one text, arguments of tool calls are objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES and not model.has_template_role(message.role):
        raise bad_field(f"{where}.role", message.role, f"use one of {', '.join(ROLES)}", code="unknown_role")
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    if isinstance(message.content, list):
        for part_index, part in enumerate(message.content):
            if part.type != "text":
                remedy = "only parts of type text are taken"
                raise bad_field(f"{where}.content[{part_index}].type", part.type, remedy, code="unsupported")
        fields["content"] = "\n".join(part.text for part in message.content)
    elif message.content is None:
        if message.role != "assistant":
            raise bad_field(f"{where}.content", None, "give a text")
        fields["content"] = ""
    # A template that puts the arguments into a sum, as DeepSeek's do, needs them as text.
    if message.tool_calls is not None and not model.has_template_word("['arguments'] +"):
        fields["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return fields


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if reserved := _RESERVED_TEMPLATE_ARGUMENTS.intersection(options):
        raise bad_field("chat_template_kwargs", sorted(reserved), "these cannot be set; leave them out")
    if _offers_tools(body):
        options["tools"] = body.tools
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
        options.setdefault("add_generation_prompt", False)
        if options["add_generation_prompt"]:
            remedy = "leave it out where the last message is continued"
            raise bad_field("add_generation_prompt", True, remedy)
    return options


def _offers_tools(body: RequestBody) -> bool:
    """Whether the model is shown tools that it may call."""
    return isinstance(body, ChatRequest) and bool(body.tools) and body.tool_choice != "none"


def _call_form(body: RequestBody, model: ServedModel) -> CallForm | None:
    """The form in which calls of the output are read; None: they are not."""
    if not isinstance(body, ChatRequest) or not _offers_tools(body) or model.tool_call_parser == "none":
        return None
    form = model.call_form()
    return form if body.tool_choice in (None, "auto") else forced_form(form)


# ---- jobs


def _make_jobs(
    body: RequestBody,
    params: SamplingParams,
    prompts: Sequence[TokenSequence],
    embeddings: Sequence[bytes],
    hints: RouterHints,
    model: ServedModel,
) -> Iterator[Job]:
    """One job per prompt, or per choice that is resumed."""
    answers = [(index, 0, TokenSequence()) for index in range(len(prompts))]
    if hints.resume:
        answers = [(*divmod(choice.index, params.n), choice.tokens) for choice in hints.resume]
    hands = _handoffs(body, model, hints.first_token or model.first_token, len(answers), params.n)
    if hints.resume:
        params = msgspec.structs.replace(params, n=1)
    salt, dp = body.cache_salt or "", _dp_group(body, model)
    for (prompt_index, index, tokens), hand in zip(answers, hands, strict=True):
        if prompt_index >= len(prompts):
            raise bad_field("baton.resume", prompt_index, "there is no such prompt")
        generated = model.check_ids(tokens, "baton.resume")
        raw = embeddings[prompt_index] if embeddings else None
        request = EngineRequest(prompts[prompt_index], params, hand, salt, raw, generated, index, dp)
        yield Job(_fit_to_context(request, body, model), prompt_index)


def _fit_to_context(request: EngineRequest, body: RequestBody, model: ServedModel) -> EngineRequest:
    """Sets max_tokens where the body does not; refuses what cannot fit into the context."""
    num_prompt, num_known, params = len(request.tokens), len(request.known), request.params
    param, limit = _PROMPT_FIELDS[type(body)], model.context_max
    if num_prompt < 1 or num_known >= limit:
        text = f"{param} has {num_prompt} tokens; the context has {limit}, one of them for the answer: "
        raise ApiError(400, f"{text}send 1 to {limit - 1}", param=param, code=TOO_LONG)
    is_prefill = isinstance(request.handoff, OutboundHandoff)
    most = limit if is_prefill else model.num_tokens_max(num_known)
    num_left = max(0, most - num_prompt)
    if params.max_tokens > num_left and not is_prefill:
        text = f"{param} has {num_prompt} tokens and max_tokens is {params.max_tokens}; together at most "
        raise ApiError(400, f"{text}{most} fit: set at most {num_left}", param="max_tokens", code=TOO_LONG)
    if params.max_tokens:
        return request
    max_tokens = max(1, min(num_left, MAX_TOKENS_DEFAULT.get(type(body), num_left)))
    if params.min_tokens > max_tokens:
        remedy = f"completions end after {max_tokens}; set max_tokens too"
        raise bad_field("min_tokens", params.min_tokens, remedy)
    return replace(request, params=msgspec.structs.replace(params, max_tokens=max_tokens))


def _handoffs(
    body: RequestBody, model: ServedModel, first_token: str, num_jobs: int, n: int
) -> list[InboundHandoff | OutboundHandoff | None]:
    """By job: where its KV cache comes from or goes to; None: it is prefilled and decoded here."""
    if body.bootstrap_room is None:
        return [None] * num_jobs
    rooms = _by_job(body.bootstrap_room, "bootstrap_room", num_jobs, n)
    if model.role == "prefill":
        return [OutboundHandoff(str(room)) for room in rooms]
    hosts = _by_job(body.bootstrap_host, "bootstrap_host", num_jobs, n)
    ports = _by_job(body.bootstrap_port, "bootstrap_port", num_jobs, n)
    hands: list[InboundHandoff | OutboundHandoff | None] = []
    for room, host, port in zip(rooms, hosts, ports, strict=True):
        if host is None or port is None or not host or len(host) > 255:
            absent = "bootstrap_port" if port is None else "bootstrap_host"
            raise bad_field(absent, port if port is None else host, "name the prefill coordinator's address")
        source = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        if model.role == "both" and source == model.address:
            hands.append(OutboundHandoff(str(room)))
        else:
            rank = body.disagg_prefill_dp_rank
            hands.append(InboundHandoff(str(room), source, rank, first_token == "prefill"))
    return hands


def _dp_group(body: RequestBody, model: ServedModel) -> int | None:
    """The DP group that the request names for this instance."""
    names = ["data_parallel_rank", "routed_dp_rank"]
    if model.role == "prefill":
        names.insert(0, "disagg_prefill_dp_rank")
    given = [(name, rank) for name in names if (rank := getattr(body, name)) is not None]
    if not given:
        return None
    name, rank = given[0]
    if rank >= model.num_dp_groups:
        raise bad_field(name, rank, f"give a DP group from 0 to {model.num_dp_groups - 1}")
    return int(rank)


def _by_job(value: Any, param: str, num_jobs: int, n: int) -> list[Any]:
    values = value if isinstance(value, list) else [value] * (1 if param == "bootstrap_room" else num_jobs)
    # Some routers count choices, not prompts: take one of each n, the same one on both sides.
    if len(values) == num_jobs * n:
        values = values[::n]
    if len(values) != num_jobs:
        raise bad_field(param, value, f"give a list of {num_jobs}, one per prompt")
    return values


# ---- bodies of responses


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
    """Log-probabilities of a completion, by token; none for the first one of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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


class ChatLogprob(TokenLogprob, frozen=True):
    """A sampled token with its most likely alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice, by token."""

    content: list[ChatLogprob]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The generated message."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
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
    tool_calls: list[ToolCall] | UnsetType = UNSET


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


GeneratedLogprob: TypeAlias = tuple[float, int, str]
"""Log-probability, id and text of a token."""


class GenerateMeta(msgspec.Struct, frozen=True):
    """`meta_info` of /generate."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[GeneratedLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[GeneratedLogprob]] | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True):
    """One result of /generate; stream events hold the whole text so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | UnsetType = UNSET


class Tokenized(msgspec.Struct, frozen=True):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The response of /detokenize."""

    prompt: str


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


# ---- from choices to responses


@dataclass(slots=True)
class ChoiceDelta:
    """New output of a choice, since the last call."""

    index: int
    is_first: bool
    """Whether nothing of the choice was sent before, here or by an earlier attempt."""
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish: str | None = None
    prompt_logprobs: Sequence[SampledToken] = ()
    """With the first delta of a choice: the prompt's tokens but the first one."""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, text: str, tokens: Sequence[SampledToken], finish: str | None) -> None:
        self.text += text
        self.tokens.extend(tokens)
        self.finish = finish

    @property
    def ids(self) -> list[int]:
        return [sampled.token for sampled in self.tokens]


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies spell each byte as a printable letter."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _token_name(tokenizer: Tokenizer | None, token: int) -> TokenName:
    if tokenizer is None:
        return f"token_id:{token}", None
    text = tokenizer.decode([token])
    if text and _BROKEN not in text:
        return text, list(text.encode())
    spelling, byte = tokenizer.spelling(token), tokenizer.byte_of(token)
    if byte is not None:
        raw = bytes([byte])
    elif text and all(letter in _LETTERS for letter in spelling):
        raw = bytes(_LETTERS[letter] for letter in spelling)
    else:
        return spelling or f"token_id:{token}", list(spelling.encode()) or None
    # A part of a character has no text of its own.
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


class ResponseFormat(ABC):
    """Renders one request's choices in the form of its API."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        self.parsed = parsed
        self.model = model
        self.head = parsed.id, parsed.created, model.name
        """What responses of OpenAI's API begin with."""
        self.event_usage = None if parsed.has_usage else UNSET
        """In events before the one with the usage."""

    def ids(self, delta: ChoiceDelta) -> list[int] | UnsetType:
        return delta.ids if self.parsed.has_ids else UNSET

    def tops(self, sampled: SampledToken, num_top: int) -> Iterator[tuple[int, float, TokenName]]:
        """The most likely tokens at a position, best first."""
        ranked = sorted(sampled.top.items(), key=lambda item: (-item[1], item[0]))
        for token, logprob in ranked[:num_top]:
            yield token, _finite(logprob), self.model.token_name(token)

    @property
    def num_top(self) -> int | None:
        """How many alternatives each token gets; None: no log-probabilities at all."""
        return self.parsed.jobs[0].request.params.logprobs

    def text_so_far(self, index: int) -> str:
        """The text that a client has of a resumed choice."""
        parsed, tokenizer = self.parsed, self.model.tokenizer
        tokens = parsed.resumed.get(index, ())
        if tokenizer is None or not tokens:
            return ""
        text = AnswerText(tokenizer, parsed.jobs[0].request.params, (), parsed.prompts[index // parsed.n])
        return "".join(text.push(token) for token in tokens)

    def is_silent(self, delta: ChoiceDelta) -> bool:
        """Whether a client would see nothing of this delta, so that it can wait for the next one."""
        has_more = delta.finish or delta.is_first or self.num_top is not None or self.parsed.has_ids
        return not delta.text and not delta.calls and not has_more

    def take(self, delta: ChoiceDelta) -> None:  # noqa: B027  (most forms show the text as it is)
        """Takes a new delta in, before anything is rendered of it."""

    @abstractmethod
    def event(self, delta: ChoiceDelta) -> msgspec.Struct:
        """A stream event."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> msgspec.Struct | None:
        """The event with the usage, where the API has one."""

    @abstractmethod
    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> object:
        """The response without a stream; each choice is one delta."""


def response_format(parsed: ParsedRequest, model: ServedModel) -> ResponseFormat:
    match parsed.body:
        case ChatRequest():
            return ChatFormat(parsed, model)
        case CompletionRequest():
            return CompletionFormat(parsed, model)
        case _:
            return GenerateFormat(parsed, model)


class CompletionFormat(ResponseFormat):
    """/v1/completions."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        super().__init__(parsed, model)
        self._offsets: dict[int, int] = {}
        """By choice: where its next token's text begins."""

    def event(self, delta: ChoiceDelta) -> Completion:
        return Completion(*self.head, [self._choice(delta)], usage=self.event_usage)

    def usage_event(self, usage: Usage) -> Completion:
        return Completion(*self.head, [], usage=usage)

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> Completion:
        return Completion(*self.head, [self._choice(delta) for delta in choices], usage=usage)

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        text = self._echo(delta.index // self.parsed.n) + delta.text if delta.is_first else delta.text
        return CompletionChoice(delta.index, text, self._logprobs(delta), delta.finish, self.ids(delta))

    def _echo(self, prompt_index: int) -> str:
        """The text that precedes the choices of a prompt."""
        parsed, body = self.parsed, self.parsed.body
        if not isinstance(body, CompletionRequest) or not body.echo:
            return ""
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        text = given[prompt_index] if len(given) == len(parsed.prompts) else None
        return text if isinstance(text, str) else self.model.decode(parsed.prompts[prompt_index])

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs | None:
        num_top, token_name = self.num_top, self.model.token_name
        if num_top is None:
            return None
        tokens = [*delta.prompt_logprobs, *delta.tokens]
        names = [token_name(sampled.token)[0] for sampled in tokens]
        values: list[float | None] = [_finite(sampled.logprob) for sampled in tokens]
        tops: list[dict[str, float] | None] = [
            {name: logprob for _, logprob, (name, _) in self.tops(sampled, num_top + 1)} for sampled in tokens
        ]
        has_prompt = self.parsed.jobs[0].request.params.prompt_logprobs is not None
        prompt = self.parsed.prompts[delta.index // self.parsed.n] if has_prompt else ()
        offset = self._offsets.get(delta.index)
        if offset is None:
            earlier = () if delta.is_first else (*prompt, *self.parsed.resumed.get(delta.index, ()))
            offset = sum(len(token_name(token)[0]) for token in earlier)
        if prompt and delta.is_first:
            names, values, tops = [token_name(prompt[0])[0], *names], [None, *values], [None, *tops]
        *offsets, self._offsets[delta.index] = accumulate(map(len, names), initial=offset)
        return CompletionLogprobs(names, values, tops, offsets)


class ChatFormat(ResponseFormat):
    """/v1/chat/completions; the role comes with the first delta of each choice."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        super().__init__(parsed, model)
        self._call_form = _call_form(parsed.body, model)
        self._parsers: dict[int, ToolCallParser] = {}

    def take(self, delta: ChoiceDelta) -> None:
        if self._call_form is None:
            return
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._new_parser(self._call_form)
            parser.push(self.text_so_far(delta.index))
        delta.text, delta.calls = parser.push(delta.text)
        if delta.finish is not None:
            rest, calls = parser.finish()
            delta.text, delta.calls = delta.text + rest, delta.calls + calls
        if isinstance(self.parsed.body, ChatRequest) and self.parsed.body.parallel_tool_calls is False:
            delta.calls = [call for call in delta.calls if call.index == 0]

    def _new_parser(self, form: CallForm) -> ToolCallParser:
        body = self.parsed.body
        assert isinstance(body, ChatRequest)
        num_before = sum(len(message.tool_calls or ()) for message in body.messages)
        return ToolCallParser(form, schemas_of(body.tools or ()), num_before)

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        parser = self._parsers.get(delta.index)
        has_calls = parser is not None and parser.num_calls
        return "tool_calls" if has_calls and delta.finish == "stop" else delta.finish

    def event(self, delta: ChoiceDelta) -> ChatChunk:
        content = Delta(delta.text, "assistant" if delta.is_first else UNSET, delta.calls or UNSET)
        choice = DeltaChoice(delta.index, content, *self._rest(delta))
        return ChatChunk(*self.head, [choice], usage=self.event_usage)

    def usage_event(self, usage: Usage) -> ChatChunk:
        return ChatChunk(*self.head, [], usage=usage)

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> ChatCompletion:
        rendered = [ChatChoice(delta.index, self._message(delta), *self._rest(delta)) for delta in choices]
        return ChatCompletion(*self.head, rendered, usage)

    def _rest(self, delta: ChoiceDelta) -> tuple[ChatLogprobs | None, str | None, list[int] | UnsetType]:
        """What a choice has beside its text, in a stream or not."""
        return self._logprobs(delta), self._finish_reason(delta), self.ids(delta)

    def _message(self, delta: ChoiceDelta) -> AssistantMessage:
        if not delta.calls:
            return AssistantMessage(delta.text)
        calls = [msgspec.structs.replace(call, index=UNSET) for call in delta.calls]
        return AssistantMessage(delta.text or None, tool_calls=calls)

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        num_top = self.num_top
        if num_top is None:
            return None
        content = []
        for sampled in delta.tokens:
            name, raw = self.model.token_name(sampled.token)
            tops = [
                TokenLogprob(text, logprob, raw) for _, logprob, (text, raw) in self.tops(sampled, num_top)
            ]
            content.append(ChatLogprob(name, _finite(sampled.logprob), raw, tops))
        return ChatLogprobs(content)


class GenerateFormat(ResponseFormat):
    """/generate: each stream event holds the whole text so far; several choices are a list."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        super().__init__(parsed, model)
        self._so_far: dict[int, ChoiceDelta] = {}
        self._is_single = len(parsed.prompts) * parsed.n == 1

    def event(self, delta: ChoiceDelta) -> Generated:
        known = self._so_far.setdefault(delta.index, delta)
        if known is delta:
            known.text = self.text_so_far(delta.index) + delta.text
        else:
            known.add(delta.text, delta.tokens, delta.finish)
        return self._generated(known, 0)

    def usage_event(self, usage: Usage) -> None:
        """Each event has the counts itself."""

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> object:
        num_cached = usage.prompt_tokens_details.cached_tokens
        results = [self._generated(delta, num_cached) for delta in choices]
        return results[0] if self._is_single else results

    def _generated(self, delta: ChoiceDelta, num_cached: int) -> Generated:
        parsed, num_top = self.parsed, self.num_top
        ids = [*parsed.resumed.get(delta.index, ()), *delta.ids]
        finish: dict[str, Any] | None = {"type": delta.finish} if delta.finish else None
        if delta.finish == "length" and finish is not None:
            finish["length"] = len(ids)
        rid = getattr(parsed.body, "rid", None)
        num_prompt = len(parsed.prompts[delta.index // parsed.n])
        logprobs: list[GeneratedLogprob] | UnsetType = UNSET
        tops: list[list[GeneratedLogprob]] | UnsetType = UNSET
        if num_top is not None:
            named = [(sampled, self.model.token_name(sampled.token)[0]) for sampled in delta.tokens]
            logprobs = [(_finite(sampled.logprob), sampled.token, name) for sampled, name in named]
        if num_top:
            tops = [
                [(logprob, token, name) for token, logprob, (name, _) in self.tops(sampled, num_top)]
                for sampled in delta.tokens
            ]
        name = rid if isinstance(rid, str) and rid else parsed.id
        meta = GenerateMeta(name, finish, num_prompt, len(ids), num_cached, logprobs, tops)
        return Generated(delta.text, ids, meta, UNSET if self._is_single else delta.index)
