"""What a router reads of a client's request; the rest of the body is passed on as it came.

The router adds fields by splicing them in before the last brace. A client may not send those fields itself:
with two of one name it would be for the reader to choose.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.serving.http import ApiError

CHAT_PATH = "/v1/chat/completions"
NUM_CHOICES_MAX = 4096
_BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_SPACE = b" \t\r\n"
_EMPTY = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The instance checks types: a value of a wrong type is passed on and refused there."""

    bootstrap_host: Any = msgspec.UNSET
    bootstrap_port: Any = msgspec.UNSET
    bootstrap_room: Any = msgspec.UNSET
    baton: Any = msgspec.UNSET
    model: Any = None
    prompt: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    stream: Any = False
    stream_options: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


_decoder = msgspec.json.Decoder(_Body)


class RawPrompt(msgspec.Struct, frozen=True):
    """The text or the ids that are prefilled, as they stand in the body: equal prefixes stay equal."""

    raw: bytes
    is_ids: bool = False
    seed: bytes = b""
    """What the model sees before it."""

    def num_tokens(self, bytes_per_token: float) -> int:
        """Counted where it is ids, else estimated."""
        if self.is_ids:
            return self.raw.count(b",") + 1
        return max(1, round(len(self.raw) / bytes_per_token))


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

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    def body_with(self, fields: bytes) -> bytes:
        """The body with these fields added: members of a JSON object, without braces."""
        comma = b"" if self.body.strip(_SPACE) == b"{" else b","
        return b"%s%s%s}" % (self.body, comma, fields)


def read_routable(path: str, raw: bytes) -> RoutableRequest:
    """Reads a body; an ApiError where it is not a JSON object or has fields that only a router may add."""
    try:
        body = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body cannot be read ({error}); send a JSON object"
        raise ApiError(400, text, code="bad_json") from None
    for name in _BOOTSTRAP_FIELDS:
        if getattr(body, name) is not msgspec.UNSET:
            text = f"{name} is chosen by the router; leave it out"
            raise ApiError(403, text, param=name, code="room_not_allowed")
    if body.baton is not msgspec.UNSET:
        fields = msgspec.json.decode(raw)
        fields.pop("baton", None)
        raw = msgspec.json.encode(fields)
    num_prompts, is_list, prompt = _read_prompt(body)
    n, options = _count(body.n) or 1, body.stream_options
    return RoutableRequest(
        path=path,
        body=raw.rstrip(_SPACE)[:-1],
        model=body.model if isinstance(body.model, str) else None,
        prompt=prompt,
        num_prompts=num_prompts,
        is_list=is_list,
        n=n if n <= NUM_CHOICES_MAX else 1,  # which an instance refuses
        num_tokens_max=_count(body.max_completion_tokens) or _count(body.max_tokens),
        is_stream=body.stream is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None


def _read_prompt(body: _Body) -> tuple[int, bool, RawPrompt]:
    messages = bytes(body.messages)
    if messages:
        # Without the closing bracket, the next turn of a chat begins with all of this one.
        return 1, False, RawPrompt(messages.rstrip(_SPACE)[:-1], seed=bytes(body.tools))
    raw = bytes(body.prompt).strip(_SPACE)
    if not raw.startswith(b"["):
        return 1, False, RawPrompt(raw[:-1])
    inside = raw[1:-1].strip(_SPACE)
    if inside[:1] not in (b'"', b"["):
        return 1, False, RawPrompt(inside, is_ids=True)
    num_prompts = len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    if num_prompts > NUM_CHOICES_MAX:
        text = f"{num_prompts} prompts; send at most {NUM_CHOICES_MAX} in a request"
        raise ApiError(400, text, param="prompt")
    return max(1, num_prompts), True, RawPrompt(inside, is_ids=inside[:1] == b"[")
