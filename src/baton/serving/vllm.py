"""vLLM servers with Baton's connector behind the router: its wire form, and instances by URL.

Both requests of a hand-over are sent at once under a transfer id of their own. Prefill computes one token,
which is not used; decode names the source and answers the client.

A stream is resumed with token ids. vLLM is asked for them (`return_token_ids`), and what a client did not ask
for is taken out of its events again. The continuation is a completion whose prompt is the ids of the prompt
and of the tokens so far; for a chat its events are turned into those of a chat. That is the same as going on
only where neither sampling nor the form of the response depends on where the output began: `_SAMPLED` lists
the fields for which that is so. With any other field that has a value, the stream ends with an error instead.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.serving.fleet import FleetInstance, ServerInfo, instance_base
from baton.serving.http import ApiError, EventSplitter, SentEvent, TokenNote, bad_field, data_event
from baton.serving.wire import (
    CHAT_PATH,
    COMPLETION_PATH,
    NUM_CHOICES_MAX,
    RoutableRequest,
    StreamFilter,
    StreamProgress,
    UpstreamRequests,
    read_routable,
)
from baton.session.registry import Role, Roster

COMPLETION_TOKENS = 16
"""vLLM's `max_tokens` of a completion that names none."""
NUM_RANKS_MAX = 1024

_PRIVATE = ("kv_transfer_params",)
_ALONE = ("best_of", "echo", "prompt_embeds", "prompt_logprobs", "use_beam_search")
"""Fields that make one request several, or need the prompt's own logits."""
_UNUSED_BY_PREFILL = (
    *("logprob_token_ids", "logprobs", "min_tokens", "return_token_ids", "stream_options"),
    *("structured_outputs", "top_logprobs"),
)
_SAMPLED = frozenset(
    {"allowed_token_ids", "cache_salt", "ignore_eos", "logit_bias", "min_p", "model", "priority"}
    | {"repetition_penalty", "seed", "session_id", "skip_special_tokens", "spaces_between_special_tokens"}
    | {"stop_token_ids", "stream_interval", "stream_options", "temperature", "top_k", "top_p", "user"}
)
"""Fields that mean the same in a continuation."""
_RENDERED = frozenset(
    {"add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"}
    | {"continue_final_message", "documents", "messages", "prompt", "reasoning_effort"}
)
"""Fields that have become token ids of the prompt."""
_REPLACED = frozenset(
    {"max_completion_tokens", "max_tokens", "min_tokens", "request_id", "return_token_ids", "stream"}
)
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {}, {"type": "text"})
"""Values that are the same as leaving a field out."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


# ---- instances


def parse_instance(role: Role, text: str) -> list[Roster]:
    """The engines of `URL[,source=HOST:PORT][,dp=N]`, one for each rank that can be asked for by itself."""
    option = f"--{role.value} {text!r}"
    url, *pairs = text.split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    if unknown := sorted(set(options) - {"source", "dp"}):
        raise ConfigError(f"{option}: {unknown[0]!r} is not known; write URL,source=HOST:PORT,dp=RANKS")
    base, source = instance_base(url), options.get("source", "")
    if role is Role.PREFILL and not source:
        raise ConfigError(
            f"{option}: decode has to know where its connector listens; add ,source=HOST:KV_PORT"
        )
    host, _, port = source.rpartition(":")
    dp = options.get("dp", "1")
    if source and not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError(f"{option}: source {source!r} has to be HOST:KV_PORT")
    if not (dp.isascii() and dp.isdigit() and 0 < int(dp) <= NUM_RANKS_MAX):
        raise ConfigError(f"{option}: dp {dp!r} has to be a whole number from 1 to {NUM_RANKS_MAX}")
    num_ranks = int(dp)
    if source and int(port) + num_ranks > 65_536:
        raise ConfigError(f"{option}: there are no {num_ranks} ports from {port} on; use a lower kv_port")
    name = f"{role.value}-{base.partition('//')[2]}"
    return [
        Roster(
            instance=f"{name}-dp{rank}" if num_ranks > 1 else name,
            role=role,
            epoch=0,
            layout="",
            coordinator=f"{host}:{int(port) + rank}" if source else "",
            fingerprint="",
            transport="",
            url=f"{base}/dp{rank}" if num_ranks > 1 else base,
            ranks=(),
            is_complete=True,
        )
        for rank in range(num_ranks)
    ]


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


# ---- requests


class VllmProgress(StreamProgress):
    """Also what a continuation needs of the events so far."""

    def __init__(self, num_choices: int, identity: str, created: int) -> None:
        super().__init__(num_choices, identity, created)
        self.prompt: list[int] = []
        self.first: dict[str, Any] = {}
        """What events say of the response, in the first attempt."""
        self.is_content = True
        """Whether the last tokens are plain content: neither reasoning nor part of a tool call."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the only choice, while it is not finished."""
        return self.resume[0].tokens


class VllmWire:
    """Servers of `vllm serve` with Baton's connector."""

    paths = (COMPLETION_PATH, CHAT_PATH)
    info_path = "/v1/models"
    key_remedy = "give the router the servers' key in VLLM_API_KEY"
    has_progress_reports = False
    """vLLM's servers do not say whether they compute."""

    def __init__(self) -> None:
        self._context: dict[str, int] = {}
        """By model: the tokens that a prompt and its completion may have."""

    def read_info(self, instance: FleetInstance, body: bytes) -> ServerInfo:
        cards = msgspec.json.decode(body, type=_ModelCards).data
        for card in cards:
            if card.max_model_len is not None:
                self._context[card.id] = card.max_model_len
        names = tuple(card.id for card in cards)
        model = names[0] if names else ""
        return ServerInfo(
            name=instance.name,
            model=model,
            models=names,
            pairs_by=model,
            epoch=instance.roster.epoch,
            is_ready=bool(names),
        )

    def read(self, path: str, raw: bytes) -> RoutableRequest:
        request = read_routable(path, raw, _PRIVATE)
        fields = _fields.decode(raw)
        n = _value(fields, "n")
        if isinstance(n, int) and n > NUM_CHOICES_MAX:
            raise bad_field("n", n, f"use at most {NUM_CHOICES_MAX}")
        is_single = request.num_choices == 1 and not any(_value(fields, name) for name in _ALONE)
        return request if is_single else msgspec.structs.replace(request, can_hand_off=False)

    def progress(self, request: RoutableRequest, identity: str, created: int) -> VllmProgress:
        return VllmProgress(request.num_choices, identity, created)

    def requests(
        self, request: RoutableRequest, progress: StreamProgress, source: str | None
    ) -> UpstreamRequests:
        assert isinstance(progress, VllmProgress)
        path, fields = request.path, dict[str, Any](_fields.decode(request.body + b"}"))
        wants_ids = _value(fields, "return_token_ids") is True
        if progress.has_begun:
            path, fields = COMPLETION_PATH, self._continuation(request, fields, progress)
        fields.setdefault("request_id", progress.id.partition("-")[2])
        stream_filter = None
        if request.is_stream:
            chat = request.path == CHAT_PATH
            reader = VllmEventReader(
                progress, wants_ids=wants_ids, is_resumed=progress.has_begun, is_chat=chat
            )
            stream_filter = StreamFilter(progress, request.n, reader, num_early=0)
            fields["return_token_ids"] = True
        if source is None:
            return UpstreamRequests(path, _encode(fields), b"", 0, stream_filter)
        transfer = uuid.uuid4().hex
        sent = {"do_remote_decode": True, "transfer_id": transfer}
        wanted = {"do_remote_prefill": True, "transfer_id": transfer, "source": source}
        prefill = {name: value for name, value in fields.items() if name not in _UNUSED_BY_PREFILL}
        prefill |= {"stream": False, "max_tokens": 1, "kv_transfer_params": sent}
        if path == CHAT_PATH:
            prefill["max_completion_tokens"] = 1
        return UpstreamRequests(
            path, _encode(fields | {"kv_transfer_params": wanted}), _encode(prefill), 1, stream_filter
        )

    def resume_problem(self, request: RoutableRequest, progress: StreamProgress) -> str:
        assert isinstance(progress, VllmProgress)
        if request.num_choices > 1:
            return f"it has {request.num_choices} choices"
        if not progress.prompt or not progress.is_exact:
            return "vLLM did not say which tokens it has"
        if not progress.is_content:
            return "its last tokens are reasoning or part of a tool call"
        fields = _fields.decode(request.body + b"}")
        others = sorted(set(fields) - _SAMPLED - _RENDERED - _REPLACED - {"n"})
        others = [name for name in others if _value(fields, name) not in _NEUTRAL]
        if others:
            return f"vLLM cannot continue the stream unchanged with {', '.join(others)}"
        if not _is_text(_value(fields, "messages") or ()):
            return "its prompt is not text alone"
        if self._num_left(request, progress) < 1:
            return "its max_tokens are used up"
        return ""

    def status(self, status: int) -> int:
        """vLLM answers 500 where a hand-over failed, and where its engine has died: another may do better."""
        return 502 if status == 500 else status

    def _continuation(
        self, request: RoutableRequest, fields: Mapping[str, msgspec.Raw], progress: VllmProgress
    ) -> dict[str, Any]:
        kept: dict[str, Any] = {name: value for name, value in fields.items() if name in _SAMPLED}
        num_min = _value(fields, "min_tokens")
        if isinstance(num_min, int) and num_min > len(progress.tokens):
            kept["min_tokens"] = num_min - len(progress.tokens)
        prompt = [*progress.prompt, *progress.tokens]
        return kept | {"prompt": prompt, "max_tokens": self._num_left(request, progress), "stream": True}

    def _num_left(self, request: RoutableRequest, progress: VllmProgress) -> int:
        """Tokens that the completion may still have."""
        num_max = request.num_tokens_max
        context = self._context.get(progress.first.get("model", ""), 0) - len(progress.prompt)
        if num_max is None:
            num_max = context if request.path == CHAT_PATH else COMPLETION_TOKENS
        return num_max - len(progress.tokens)


def _value(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _is_text(messages: Any) -> bool:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, str) or part.get("type") == "text" for part in parts)


# ---- streams


class VllmEventReader(EventSplitter):
    """Splits the stream of one attempt into events, and notes the token ids in each."""

    def __init__(self, progress: VllmProgress, *, wants_ids: bool, is_resumed: bool, is_chat: bool) -> None:
        super().__init__()
        self._progress = progress
        self._wants_ids = wants_ids
        self._is_resumed = is_resumed
        self._is_chat = is_chat
        self._num_before = len(progress.tokens) if is_resumed else 0

    def feed(self, data: bytes) -> Iterator[SentEvent]:
        for event in super().feed(data):
            payload = event.data
            if payload is None or not payload.startswith(b"{") or payload.startswith(b'{"error"'):
                yield event
                continue
            try:
                yield self._read(event, msgspec.json.decode(payload, type=dict[str, Any]))
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
                raise ApiError(502, f"an event cannot be read ({error!r}); is this vLLM?") from None

    def _read(self, event: SentEvent, value: dict[str, Any]) -> SentEvent:
        progress = self._progress
        if not progress.first:
            progress.first = {name: value[name] for name in ("id", "created", "model")}
        choices = value["choices"]
        note = self._note(value, choices[0]) if choices else None
        if self._wants_ids and not self._is_resumed:
            return SentEvent(event.raw, note)
        hidden = ("prompt_token_ids",) if self._wants_ids else ("prompt_token_ids", "token_ids")
        for fields in (value, *choices):
            fields |= {name: None for name in hidden if name in fields}  # as vLLM does where nobody asks
        if self._is_resumed:
            self._rewrite(value)
        elif choices and note is not None and choices[0].get("delta") == {} and note.finish is None:
            return SentEvent(b"", note)  # it came for its ids alone
        return SentEvent(data_event(_encode(value)), note)

    def _note(self, value: Mapping[str, Any], choice: Mapping[str, Any]) -> TokenNote:
        progress, delta = self._progress, choice.get("delta", choice)
        if not progress.prompt:
            progress.prompt = value.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
        tokens = tuple(choice.get("token_ids") or ())
        texts = [delta.get(name) for name in ("text", "content", "reasoning", "tool_calls")]
        if tokens:
            progress.is_content = any(text is not None for text in texts[:2]) and not any(texts[2:])
        elif any(texts):  # vLLM hides the ids of reasoning that a client does not want to see
            progress.is_exact, tokens = False, (0,)
        return TokenNote(choice["index"], tokens, choice.get("finish_reason"))

    def _rewrite(self, value: dict[str, Any]) -> None:
        """Makes an event of the continuation into one of the response that the client has begun to read."""
        first = self._progress.first
        value |= {"id": first["id"], "created": first["created"]}
        if usage := value.get("usage"):
            usage["prompt_tokens"] -= self._num_before
            usage["completion_tokens"] += self._num_before
        if self._is_chat:
            value["object"] = "chat.completion.chunk"
            for choice in value["choices"]:
                choice["delta"] = {"content": choice.pop("text")}
