"""What a client asked, as far as a router has to know; the rest of the body is passed on as it came.

A router adds fields by splicing them in before the last brace. Whatever it adds, a client may not have sent:
with two of a name it would be for the reader to choose.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.web import Problem

CHAT_PATH = "/v1/chat/completions"
NUM_CHOICES_MAX = 4096
_ROOMS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_SPACE = b" \t\r\n"
_EMPTY = msgspec.Raw(b"")


class _Reserved(msgspec.Struct):
    """What only a router says."""

    bootstrap_host: Any = msgspec.UNSET
    bootstrap_port: Any = msgspec.UNSET
    bootstrap_room: Any = msgspec.UNSET
    baton: Any = msgspec.UNSET


class _Body(_Reserved):
    """Types are for the instance to check: what is strange here is passed on and refused there."""

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


class Prompt(msgspec.Struct, frozen=True):
    """The text or the ids that are prefilled, as they stand in the body: equal beginnings stay equal."""

    raw: bytes
    is_ids: bool = False
    seed: bytes = b""
    """What goes before it in the model's eyes."""

    @property
    def num_ids(self) -> int:
        """How many token ids it is, if it is ids."""
        return self.raw.count(b",") + 1 if self.is_ids else 0

    def num_tokens(self, bytes_per_token: float) -> int:
        """Counted where it is ids, else estimated."""
        return self.num_ids if self.is_ids else max(1, round(len(self.raw) / bytes_per_token))


class Asked(msgspec.Struct, frozen=True):
    """One request of a client."""

    path: str
    body: bytes
    """Without its last brace."""
    model: str | None
    prompt: Prompt
    num_prompts: int
    is_list: bool
    """Whether rooms are lists too."""
    num_answers: int
    num_tokens_max: int | None
    is_stream: bool
    wants_usage: bool

    @property
    def num_choices(self) -> int:
        """All answers to all prompts."""
        return self.num_prompts * self.num_answers

    def spliced(self, fields: bytes) -> bytes:
        """The body with these fields added: members of a JSON object, without braces."""
        comma = b"" if self.body.strip(_SPACE) == b"{" else b","
        return b"%s%s%s}" % (self.body, comma, fields)


def read_asked(path: str, raw: bytes) -> Asked:
    """Reads a request's body; a Problem where it is no JSON object or names what only a router may."""
    try:
        body = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(
            400, f"the body cannot be read ({error}); send a JSON object", code="bad_json"
        ) from None
    for name in _ROOMS:
        if getattr(body, name) is not msgspec.UNSET:
            raise Problem(
                403, f"{name} is chosen by the router; leave it out", param=name, code="room_not_allowed"
            )
    if body.baton is not msgspec.UNSET:
        raw = _without_private(raw)
    num_prompts, is_list, prompt = _read_prompt(body)
    num_answers = _count(body.n) or 1
    options = body.stream_options
    return Asked(
        path=path,
        body=raw.rstrip(_SPACE)[:-1],
        model=body.model if isinstance(body.model, str) else None,
        prompt=prompt,
        num_prompts=num_prompts,
        is_list=is_list,
        num_answers=num_answers if num_answers <= NUM_CHOICES_MAX else 1,  # which an instance refuses
        num_tokens_max=_count(body.max_completion_tokens) or _count(body.max_tokens),
        is_stream=body.stream is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _checked(num_prompts: int) -> int:
    if num_prompts > NUM_CHOICES_MAX:
        text = f"{num_prompts} prompts; send at most {NUM_CHOICES_MAX} in a request"
        raise Problem(400, text, param="prompt")
    return max(1, num_prompts)


def _without_private(raw: bytes) -> bytes:
    fields = msgspec.json.decode(raw)
    fields.pop("baton", None)
    return msgspec.json.encode(fields)


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None


def _read_prompt(body: _Body) -> tuple[int, bool, Prompt]:
    messages = bytes(body.messages)
    if messages:
        # Without the closing bracket, a dialogue's next turn begins with all of this one.
        return 1, False, Prompt(messages.rstrip(_SPACE)[:-1], seed=bytes(body.tools))
    raw = bytes(body.prompt).strip(_SPACE)
    if not raw.startswith(b"["):
        return 1, False, Prompt(raw[:-1])
    inside = raw[1:-1].strip(_SPACE)
    if inside[:1] in (b'"', b"["):
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return _checked(len(parts)), True, Prompt(inside, is_ids=inside[:1] == b"[")
    return 1, False, Prompt(inside, is_ids=True)
