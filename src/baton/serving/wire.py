"""What a router exchanges with the instances of an engine: the requests of an attempt, and their streams.

A wire is all that the router knows of an engine's HTTP. `BatonWire` is that of `baton serve`; vLLM's is in
`baton.serving.vllm`. Choosing, waiting, retrying and forwarding are the router's, and the same for both.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from baton.errors import BatonError
from baton.serving.fleet import FleetInstance, ServerInfo
from baton.serving.http import ApiError, EventSplitter, ResumedChoice, RouterHints, TokenNote
from baton.serving.policies import RawPrompt

COMPLETION_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
GENERATE_PATH = "/generate"
ID_PREFIXES = {CHAT_PATH: "chatcmpl-", GENERATE_PATH: "gen-"}
"""Of a response, by path; `cmpl-` for others."""
NUM_CHOICES_MAX = 4096
ROOM_BITS = 63

_BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
DP_RANK_FIELDS = ("data_parallel_rank", "routed_dp_rank")
"""Of the instance that answers; prefill's is `disagg_prefill_dp_rank`."""
_SPACE = b" \t\r\n"
_EMPTY = msgspec.Raw(b"")
_ERROR = b'{"error"'
_encoder = msgspec.json.Encoder()


# ---- the seam


@dataclass(frozen=True, slots=True)
class UpstreamRequests:
    """The requests of one attempt: to the instance that answers, and to the one that prefills for it."""

    path: str
    server_body: bytes
    prefill_body: bytes
    num_jobs: int
    """Prompts that are handed over, where there is a prefill instance."""
    stream_filter: StreamFilter | None
    """None where the response is not a stream."""


class BatonWire:
    """Instances of `baton serve`; that of another engine has the same methods."""

    paths = (COMPLETION_PATH, CHAT_PATH, GENERATE_PATH)
    """Where clients ask for completions."""
    info_path = "/server_info"
    key_remedy = "give both the same secret"
    has_progress_reports = True
    """Whether instances report what they compute, so that a queue that stands still can be seen."""

    def __init__(self, first_token: Literal["", "prefill", "decode"] = "") -> None:
        self._first_token = first_token

    def read_info(self, instance: FleetInstance, body: bytes) -> ServerInfo:
        return msgspec.json.decode(body, type=ServerInfo)

    def read(self, path: str, raw: bytes) -> RoutableRequest:
        """Reads a client's request; an ApiError where it cannot be routed."""
        return read_routable(path, raw)

    def progress(self, request: RoutableRequest, identity: str, created: int) -> StreamProgress:
        """The progress of a response that has not begun."""
        return StreamProgress(request.num_choices, identity, created)

    def requests(
        self, request: RoutableRequest, progress: StreamProgress, source: str | None
    ) -> UpstreamRequests:
        """The requests of a new attempt; `source` is the prefill instance's coordinator, if there is one.

        Both get the client's body with the router's hints and rooms that were never used before.
        """
        hints = RouterHints(
            id=progress.id,
            created=progress.created,
            tokens=request.is_stream,
            resume=progress.resume if progress.has_begun else (),
            done=progress.done if progress.has_begun else {},
            first_token=self._first_token,
        )
        num_rooms = len(hints.resume) if progress.has_begun else request.num_prompts
        body = _baton_body(request, hints, source, num_rooms)
        stream_filter = None
        if request.is_stream:
            stream_filter = StreamFilter(progress, 1 if hints.resume else request.n)
        prefill_body = body
        if request.dp_rank is not None:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            prefill_body = _encoder.encode({k: v for k, v in fields.items() if k not in DP_RANK_FIELDS})
        return UpstreamRequests(request.path, body, prefill_body, num_rooms, stream_filter)

    def resume_problem(self, request: RoutableRequest, progress: StreamProgress) -> str:
        """Why a stream that has begun cannot go on elsewhere; empty where it can."""
        return request.resume_problem

    def status(self, status: int) -> int:
        """The status to act on where an instance answered with this one."""
        return status


class _RoomFields(msgspec.Struct, frozen=True):
    bootstrap_host: str | list[str]
    bootstrap_port: int | list[int]
    bootstrap_room: int | list[int]


@lru_cache(maxsize=1024)
def _split_coordinator(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise BatonError(f"an instance has coordinator {coordinator!a}; it has to be host:port")
    return host.strip("[]"), int(port)


def _baton_body(request: RoutableRequest, hints: RouterHints, source: str | None, num_rooms: int) -> bytes:
    private = b'"baton":' + _encoder.encode(hints)
    if source is None or not num_rooms:
        return request.body_with(private)
    host, port = _split_coordinator(source)
    rooms = [secrets.randbits(ROOM_BITS) for _ in range(num_rooms)]
    if request.is_list or num_rooms > 1:
        fields = _RoomFields([host] * num_rooms, [port] * num_rooms, rooms)
    else:
        fields = _RoomFields(host, port, rooms[0])
    return request.body_with(_encoder.encode(fields)[1:-1] + b"," + private)


# ---- what routing reads of a body
#
# The rest of the body is passed on as it came. The router adds fields by splicing them in before the last
# brace. A client may not send those fields itself: with two of one name it would be for the reader to choose.


class _AnyBody(msgspec.Struct):
    """The instance checks types: a value of a wrong type is passed on and refused there."""

    bootstrap_host: Any = msgspec.UNSET
    bootstrap_port: Any = msgspec.UNSET
    bootstrap_room: Any = msgspec.UNSET
    kv_transfer_params: Any = msgspec.UNSET
    baton: Any = msgspec.UNSET
    data_parallel_rank: Any = None
    routed_dp_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    model: Any = None
    stream: Any = False


class _Body(_AnyBody):
    """Of OpenAI's API."""

    prompt: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    stream_options: Any = None
    n: Any = None
    echo: Any = None
    logprobs: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


class _GenerateBody(_AnyBody):
    """Of SGLang's /generate."""

    text: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    input_embeds: msgspec.Raw = _EMPTY
    sampling_params: Any = None
    return_logprob: Any = None


_body_decoder = msgspec.json.Decoder(_Body)
_generate_decoder = msgspec.json.Decoder(_GenerateBody)


class RoutableRequest(msgspec.Struct, frozen=True):
    """One request of a client, as far as routing needs it."""

    path: str
    body: bytes
    """Without its last brace."""
    model: str | None
    prompt: RawPrompt
    num_prompts: int
    is_list: bool
    """Whether rooms are lists too."""
    n: int
    num_tokens_max: int | None
    is_stream: bool
    wants_usage: bool
    can_hand_off: bool = True
    """False where its form allows no hand-over: one instance answers it alone."""
    resume_problem: str = ""
    """Why its stream cannot go on elsewhere once it has begun."""
    dp_rank: int | None = None
    """The DP group of the instance that answers."""
    dp_field: str = DP_RANK_FIELDS[0]
    """The field that names it."""
    prefill_dp_rank: int | None = None

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    def body_with(self, fields: bytes) -> bytes:
        """The body with these fields added: members of a JSON object, without braces."""
        comma = b"" if self.body.strip(_SPACE) == b"{" else b","
        return b"%s%s%s}" % (self.body, comma, fields)


def read_routable(path: str, raw: bytes, private: Sequence[str] = _BOOTSTRAP_FIELDS) -> RoutableRequest:
    """Reads a body; an ApiError where it is not a JSON object or has fields that only a router may add."""
    try:
        body = (_generate_decoder if path == GENERATE_PATH else _body_decoder).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body cannot be read ({error}); send a JSON object"
        raise ApiError(400, text, code="no_json") from None
    for name in private:
        if getattr(body, name) is not msgspec.UNSET:
            text = f"{name} is chosen by the router; leave it out"
            raise ApiError(403, text, param=name, code="room_not_allowed")
    if body.baton is not msgspec.UNSET:
        fields = msgspec.json.decode(raw)
        fields.pop("baton", None)
        raw = msgspec.json.encode(fields)
    dp_field = next((name for name in DP_RANK_FIELDS if getattr(body, name) is not None), DP_RANK_FIELDS[0])
    fields = _read_generate(body) if isinstance(body, _GenerateBody) else _read_openai(body)
    return RoutableRequest(
        path=path,
        body=raw.rstrip(_SPACE)[:-1],
        model=body.model if isinstance(body.model, str) else None,
        is_stream=body.stream is True,
        dp_rank=_rank(getattr(body, dp_field)),
        dp_field=dp_field,
        prefill_dp_rank=_rank(body.disagg_prefill_dp_rank),
        **fields,
    )


def _read_openai(body: _Body) -> dict[str, Any]:
    """The fields of a RoutableRequest that only OpenAI's API has."""
    options = body.stream_options
    num_tokens_max = _count(body.max_completion_tokens) or _count(body.max_tokens)
    if body.echo is True and body.max_tokens == 0:
        num_tokens_max = 1
    messages = bytes(body.messages)
    if messages:
        # Without the closing bracket, the next turn of a chat begins with all of this one.
        num_prompts, is_list = 1, False
        prompt = RawPrompt(messages.rstrip(_SPACE)[:-1], seed=bytes(body.tools))
    else:
        num_prompts, is_list, prompt = _read_prompt(body.prompt, "prompt")
    return {
        "num_prompts": num_prompts,
        "is_list": is_list,
        "prompt": prompt,
        "n": _num_choices(body.n),
        "num_tokens_max": num_tokens_max,
        "wants_usage": isinstance(options, dict) and options.get("include_usage") is True,
        # The prompt's log-probabilities are computed where it is prefilled.
        "can_hand_off": not (body.echo is True and body.logprobs is not None),
    }


def _read_generate(body: _GenerateBody) -> dict[str, Any]:
    """What only /generate has of a RoutableRequest; of several kinds of prompt the instance accepts none."""
    params = body.sampling_params if isinstance(body.sampling_params, dict) else {}
    problem = ""
    if bytes(body.input_embeds) not in (b"", b"null"):
        num_prompts, is_list, prompt = _read_embeddings(body.input_embeds)
        problem = "its prompt came as input embeddings"
    else:
        name = "input_ids" if bytes(body.text) in (b"", b"null") else "text"
        num_prompts, is_list, prompt = _read_prompt(getattr(body, name), name)
    if body.return_logprob is True:
        problem = "each event has the log-probabilities of all tokens so far"
    return {
        "num_prompts": num_prompts,
        "is_list": is_list,
        "prompt": prompt,
        "n": _num_choices(params.get("n")),
        "num_tokens_max": _count(params.get("max_new_tokens")),
        "wants_usage": False,
        "resume_problem": problem,
    }


def _rank(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None


def _num_choices(value: Any) -> int:
    """Of each prompt; 1 for what an instance refuses."""
    n = _count(value) or 1
    return n if n <= NUM_CHOICES_MAX else 1


def _read_prompt(value: msgspec.Raw, param: str) -> tuple[int, bool, RawPrompt]:
    raw = bytes(value).strip(_SPACE)
    if not raw.startswith(b"["):
        return 1, False, RawPrompt(raw[:-1])
    inside = raw[1:-1].strip(_SPACE)
    if inside[:1] not in (b'"', b"["):
        return 1, False, RawPrompt(inside, is_ids=True)
    num_prompts = len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    _check_prompts(num_prompts, param)
    return max(1, num_prompts), True, RawPrompt(inside, is_ids=inside[:1] == b"[")


def _read_embeddings(value: msgspec.Raw) -> tuple[int, bool, RawPrompt]:
    """One row of numbers per token; several prompts are lists of rows."""
    try:
        rows = msgspec.json.decode(value, type=list[list[msgspec.Raw]])
    except msgspec.DecodeError:
        rows = []
    are_many = bool(rows and rows[0]) and bytes(rows[0][0]).startswith(b"[")
    num_rows = sum(map(len, rows)) if are_many else len(rows)
    prompt = RawPrompt(b"", is_ids=True, num_rows=max(1, num_rows))
    if not are_many:
        return 1, False, prompt
    _check_prompts(len(rows), "input_embeds")
    return len(rows), True, prompt


def _check_prompts(num_prompts: int, param: str) -> None:
    if num_prompts > NUM_CHOICES_MAX:
        text = f"{num_prompts} prompts; send at most {NUM_CHOICES_MAX} in a request"
        raise ApiError(400, text, param=param)


# ---- streams


class StreamProgress:
    """The part of its response that a client has, over all attempts: the tokens of every choice."""

    def __init__(self, num_choices: int, identity: str = "", created: int = 0) -> None:
        self.id = identity
        self.created = created
        self.has_begun = False
        """Whether anything was streamed: a further attempt goes on from there."""
        self.done: dict[int, int] = {}
        """By finished choice: its number of tokens."""
        self.has_usage = False
        """Whether the client has the event after the last choice."""
        self.is_exact = True
        """Whether all tokens are known that the client has text of."""
        self._tokens: dict[int, list[int]] = {index: [] for index in range(num_choices)}

    def add(self, note: TokenNote) -> None:
        """An event was read, whose tokens the client is about to get."""
        tokens = self._tokens.get(note.index)
        if tokens is None:
            return
        tokens.extend(note.tokens)
        if note.finish is not None:
            self.done[note.index] = len(tokens)

    def has_token(self, index: int) -> bool:
        """Whether the client has a token of this choice."""
        return bool(self._tokens.get(index))

    @property
    def resume(self) -> tuple[ResumedChoice, ...]:
        """The choices that are not finished, with their tokens."""
        return tuple(
            ResumedChoice(index, tuple(tokens))
            for index, tokens in self._tokens.items()
            if index not in self.done
        )

    @property
    def is_finished(self) -> bool:
        return len(self.done) == len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Of all unfinished choices: what has to be computed again to resume."""
        return sum(len(tokens) for index, tokens in self._tokens.items() if index not in self.done)


class StreamFilter:
    """Takes the token notes out of one attempt's stream; only whole events go on to the client.

    Events before a choice's first token (its role) are held until that token: an attempt that resumes a
    choice without tokens begins it again, and a client has to see one beginning.
    """

    def __init__(
        self, progress: StreamProgress, n: int, reader: EventSplitter | None = None, num_early: int = 1
    ) -> None:
        self.error: bytes | None = None
        """The error event that ended the stream."""
        self.is_done = False
        """Whether the stream has come to its proper end."""
        self._progress = progress
        self._n = n
        self._reader = reader or EventSplitter()
        self._num_early = num_early
        """Tokens of a choice that may come before decode has the cache."""
        self._num_tokens: dict[int, int] = {}
        self._admitted: set[int] = set()
        self._held: dict[int, bytes] = {}

    def feed(self, data: bytes) -> bytes:
        """The bytes to forward to the client."""
        out: list[bytes] = []
        for event in self._reader.feed(data):
            if event.note is not None:
                out.append(self._forward(event.note, event.raw))
                continue
            payload = event.data
            if payload is not None and payload.startswith(_ERROR):
                self.error = payload
                break
            out.append(event.raw)
            self._progress.has_usage |= payload is not None and self._progress.is_finished
            if event.is_done:
                self.is_done = True
                break
        return b"".join(out)

    def are_admitted(self, num_jobs: int) -> bool:
        """Whether decode has the cache of every job: it is past the tokens that may come before."""
        return len(self._admitted) >= num_jobs

    def _forward(self, note: TokenNote, raw: bytes) -> bytes:
        """The bytes to forward now, of this event and of events held before it."""
        index = note.index
        held = self._held.pop(index, b"") if self._held else b""
        if not note.tokens and note.finish is None and not self._progress.has_token(index):
            self._held[index] = held + raw
            return b""
        self._record(note)
        return held + raw

    def _record(self, note: TokenNote) -> None:
        self._progress.add(note)
        num_tokens = self._num_tokens.get(note.index, 0) + len(note.tokens)
        self._num_tokens[note.index] = num_tokens
        if num_tokens > self._num_early or note.finish is not None:
            self._admitted.add(note.index // self._n)
