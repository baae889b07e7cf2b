"""From a decoded request body to the jobs that an instance runs.

The n choices of a prompt are one job: one prefill, one hand-off, and the decode forks. The index of a choice
is the index of its prompt times n, plus which of the n it is. A request that resumes an earlier attempt has
one job for each choice that was not finished, in the order in which they are listed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff
from baton.engine.sampling_params import SamplingParams, check_params
from baton.engine.tokenizer import Tokenizer
from baton.errors import ConfigError
from baton.serving.http import ApiError, Caller, RouterHints, bad_field
from baton.serving.schema import (
    NUM_PROMPTS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerateParams,
    GenerateRequest,
    Message,
    OpenAIFields,
    RequestBody,
)

T = TypeVar("T")
TokenSequence = tuple[int, ...]

TOO_LONG = "context_length_exceeded"
NUM_CHOICES_MAX = 256
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
_FIELD = re.compile(r"(\w+) is ")
_FIELD_NAMES = {"stop_ids": "stop_token_ids"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a running instance, as far as requests need it."""

    tokenizer: Tokenizer | None
    context_max: int
    vocab_size: int
    num_tokens_max: Callable[[int], int]
    """The most tokens of prompt and completion together, for a prompt of so many tokens."""

    @staticmethod
    def of(instance: Instance) -> ServedModel:
        sizes = instance.sizes
        vocab_size = sizes.architecture.vocab_size
        return ServedModel(instance.tokenizer, sizes.context_max, vocab_size, instance.core.num_tokens_max)

    async def encode(self, text: str, param: str) -> TokenSequence:
        tokenizer = self._tokenizer(param)
        self._check_characters(len(text), param)
        return tuple(await _off_loop(lambda: tokenizer.encode(text), len(text)))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> TokenSequence:
        """Applies the chat template; `options` are its other arguments."""
        tokenizer = self._tokenizer("messages")
        if not tokenizer.has_chat_template:
            text = "the model has no chat template; send the prompt to /v1/completions"
            raise ApiError(400, text, param="messages", code="unsupported")
        if options.get("tools") and not tokenizer.has_template_word("tools"):
            raise bad_field("tools", options["tools"], "the model's chat template takes none; leave them out")
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
            text = f"the chat template cannot use the messages ({type(error).__name__}: {error}); mend them"
            raise ApiError(400, text, param="messages") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

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
class ReceivingInstance:
    """The instance that a request came to."""

    role: str
    address: str
    """Of its coordinator, as host:port."""
    first_token: str
    """prefill or decode: which side's first token is streamed."""
    model: str
    """The served model's name."""


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
    echoes: tuple[str, ...]
    """By prompt: the text that precedes its choices."""
    hints: RouterHints

    @property
    def is_prefill(self) -> bool:
        """Whether its KV cache is handed off: it is answered when the hand-offs are settled."""
        return any(isinstance(job.request.handoff, OutboundHandoff) for job in self.jobs)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

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


async def parse_request(
    body: RequestBody, caller: Caller, model: ServedModel, instance: ReceivingInstance
) -> ParsedRequest:
    """Checks a body and turns it into jobs; an ApiError where it cannot be served."""
    hints = _read_hints(body, caller)
    for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        if getattr(body, name) is not None and not caller.is_trusted:
            text = f"{name} is accepted only from this machine or with the router's key; leave it out"
            raise ApiError(403, text, param=name, code="room_not_allowed")
    _check_model(body, instance.model)
    room = body.bootstrap_room
    if isinstance(room, list):
        room = room[0] if room else 0
    # The room seeds both sides of a hand-off, so that they sample alike.
    params = sampling_params(body, room or secrets.randbits(63))
    if params.stop and model.tokenizer is None:
        raise bad_field("stop", params.stop, "the model has no tokenizer; use stop_token_ids")
    prompts = await _read_prompts(body, model)
    if len(prompts) * params.n > NUM_CHOICES_MAX:
        text = f"{len(prompts)} prompts with n {params.n}: at most {NUM_CHOICES_MAX} choices in a request"
        raise ApiError(400, text, param="n")
    _check_params(params, model.vocab_size)
    first_token = hints.first_token or instance.first_token
    num_jobs = len(hints.resume) or len(prompts)
    hands = _hand_offs(body, replace(instance, first_token=first_token), num_jobs, params.n)
    return ParsedRequest(
        id=hints.id or f"{_ID_PREFIXES[type(body)]}{secrets.token_hex(16)}",
        created=hints.created or int(time.time()),
        body=body,
        jobs=_make_jobs(body, params, prompts, hints=hints, hands=hands, model=model),
        n=params.n,
        prompts=tuple(prompts),
        echoes=tuple(_echoes(body, prompts, model)),
        hints=hints,
    )


def _read_hints(body: RequestBody, caller: Caller) -> RouterHints:
    if not caller.is_trusted or bytes(body.baton) == b"null":
        return RouterHints()
    try:
        return msgspec.json.decode(body.baton, type=RouterHints)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"baton: {error}; see docs/http.md", param="baton") from None


def _check_model(body: RequestBody, served: str) -> None:
    wanted = body.model if isinstance(body, OpenAIFields) else None
    if wanted is None or wanted in (served, served.rstrip("/").rpartition("/")[2]):
        return
    if wanted.startswith(f"{served}:"):
        raise bad_field("model", wanted, f"adapters are not served; use {served!a}", code="unsupported")
    text = f"the model {wanted[:80]!a} is not served here; use {served!a}"
    raise ApiError(404, text, param="model", code="model_not_found")


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    try:
        check_params(msgspec.structs.replace(params, max_tokens=params.max_tokens or 2**31), vocab_size)
    except ConfigError as error:
        match = _FIELD.match(str(error))
        param = _FIELD_NAMES.get(match[1], match[1]) if match else None
        raise ApiError(400, str(error), param=param) from None


# ---- sampling parameters


def sampling_params(body: RequestBody, seed: int) -> SamplingParams:
    """The parameters of every choice; `seed` where the body has none, max_tokens 0 where it sets none."""
    match body:
        case CompletionRequest():
            if body.best_of not in (None, body.n or 1):
                remedy = f"choices are not ranked; use n, which is {body.n or 1}"
                raise bad_field("best_of", body.best_of, remedy)
            return _openai_params(body, body.max_tokens or 0, body.logprobs, seed)
        case ChatRequest():
            if body.top_logprobs is not None and not body.logprobs:
                raise bad_field("top_logprobs", body.top_logprobs, "set logprobs to true too")
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = body.max_completion_tokens or body.max_tokens or 0
            return _openai_params(body, max_tokens, num_logprobs, seed)
        case GenerateRequest():
            given = body.sampling_params or GenerateParams()
            return SamplingParams(
                temperature=_or(given.temperature, 1.0),
                top_k=max(0, given.top_k or 0),
                top_p=_or(given.top_p, 1.0),
                min_p=given.min_p or 0.0,
                repetition_penalty=_or(given.repetition_penalty, 1.0),
                presence_penalty=given.presence_penalty or 0.0,
                frequency_penalty=given.frequency_penalty or 0.0,
                logit_bias=_bias(given.logit_bias, "sampling_params.logit_bias"),
                seed=seed if given.sampling_seed is None else given.sampling_seed,
                stop=_stop(given.stop),
                stop_ids=tuple(given.stop_token_ids or ()),
                min_tokens=given.min_new_tokens or 0,
                max_tokens=given.max_new_tokens or 0,
                ignore_eos=bool(given.ignore_eos),
                n=given.n or 1,
                logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
            )


def _openai_params(body: OpenAIFields, max_tokens: int, logprobs: int | None, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias, "logit_bias"),
        seed=seed if body.seed is None else body.seed,
        stop=_stop(body.stop),
        stop_ids=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        n=body.n or 1,
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _bias(bias: Mapping[str, float] | None, param: str) -> dict[int, float]:
    wrong = next((key for key in bias or () if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if wrong is not None:
        raise ApiError(400, f"{param} has the key {wrong[:20]!a}: give token ids", param=param)
    return {int(key): value for key, value in (bias or {}).items()}


# ---- prompts


async def _read_prompts(body: RequestBody, model: ServedModel) -> list[TokenSequence]:
    match body:
        case ChatRequest():
            options = _template_options(body)
            messages = [_template_message(message, index) for index, message in enumerate(body.messages)]
            return [await model.encode_chat(messages, options)]
        case CompletionRequest():
            return await _texts_or_ids(body.prompt, "prompt", model)
        case GenerateRequest():
            if (body.text is None) == (body.input_ids is None):
                raise ApiError(400, "give either text or input_ids", param="text")
            if body.text is not None:
                return await _texts_or_ids(body.text, "text", model)
            return await _texts_or_ids(body.input_ids, "input_ids", model)


async def _texts_or_ids(value: Any, param: str, model: ServedModel) -> list[TokenSequence]:
    if isinstance(value, str):
        return [await model.encode(value, param)]
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
    return [await model.encode(text, param) for text in value]


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content is one text, arguments of tool calls are objects."""
    where = f"messages[{index}]"
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
    if message.tool_calls is not None:
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
    if body.tools:
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


def _echoes(body: RequestBody, prompts: Sequence[TokenSequence], model: ServedModel) -> list[str]:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return [""] * len(prompts)
    if body.logprobs is not None:
        raise bad_field("echo", True, "prompts have no log-probabilities here; leave out one of the two")
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return [
        str(text) if isinstance(text, str) else model.decode(ids)
        for text, ids in zip(given if len(given) == len(prompts) else prompts, prompts, strict=True)
    ]


# ---- jobs


def _make_jobs(
    body: RequestBody,
    params: SamplingParams,
    prompts: Sequence[TokenSequence],
    *,
    hints: RouterHints,
    hands: Sequence[InboundHandoff | OutboundHandoff | None],
    model: ServedModel,
) -> tuple[Job, ...]:
    salt, jobs = body.cache_salt or "", []
    if hints.resume:
        alone = msgspec.structs.replace(params, n=1)
        for choice, hand in zip(hints.resume, hands, strict=True):
            prompt_index, index = divmod(choice.index, params.n)
            if not 0 <= prompt_index < len(prompts):
                raise bad_field("baton.resume", choice.index, "there is no such choice")
            generated = model.check_ids(choice.tokens, "baton.resume")
            prompt = prompts[prompt_index]
            request = EngineRequest(prompt, alone, hand, salt, generated=generated, index=index)
            jobs.append(Job(_fit_to_context(request, body, model), prompt_index))
    else:
        for prompt_index, (prompt, hand) in enumerate(zip(prompts, hands, strict=True)):
            request = EngineRequest(prompt, params, hand, salt)
            jobs.append(Job(_fit_to_context(request, body, model), prompt_index))
    return tuple(jobs)


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


def _hand_offs(
    body: RequestBody, instance: ReceivingInstance, num_jobs: int, n: int
) -> list[InboundHandoff | OutboundHandoff | None]:
    """By job: where its KV cache comes from or goes to; None: it is prefilled and decoded here."""
    if body.bootstrap_room is None:
        return [None] * num_jobs
    rooms = _by_job(body.bootstrap_room, "bootstrap_room", num_jobs, n)
    if instance.role == "prefill":
        return [OutboundHandoff(str(room)) for room in rooms]
    hosts = _by_job(body.bootstrap_host, "bootstrap_host", num_jobs, n)
    ports = _by_job(body.bootstrap_port, "bootstrap_port", num_jobs, n)
    hands: list[InboundHandoff | OutboundHandoff | None] = []
    for room, host, port in zip(rooms, hosts, ports, strict=True):
        if host is None or port is None or not host or len(host) > 255:
            absent = "bootstrap_port" if port is None else "bootstrap_host"
            raise bad_field(absent, port if port is None else host, "name the prefill coordinator's address")
        source = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        if instance.role == "both" and source == instance.address:
            hands.append(OutboundHandoff(str(room)))
        else:
            hands.append(InboundHandoff(str(room), source, is_early=instance.first_token == "prefill"))
    return hands


def _by_job(value: Any, param: str, num_jobs: int, n: int) -> list[Any]:
    values = value if isinstance(value, list) else [value] * (1 if param == "bootstrap_room" else num_jobs)
    # Some routers count choices, not prompts: take one of each n, the same one on both sides.
    if len(values) == num_jobs * n:
        values = values[::n]
    if len(values) != num_jobs:
        raise bad_field(param, value, f"give a list of {num_jobs}, one per prompt")
    return values
