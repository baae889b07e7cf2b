"""What router and instances exchange beside OpenAI's API: the request field `baton`, and notes in streams.

A client of OpenAI's API skips lines that begin with a colon. So the tokens of each event, which a router
needs to resume a stream on another instance, are in such a line before the event, in the same block; the
router forwards the rest without decoding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.serving.errors import ApiError

DONE = b"data: [DONE]\n\n"
PROMPT_TOKENS_HEADER = "X-Prompt-Tokens"
"""How an instance reports the length of the prompt, whatever the form of its response."""
EVENT_BYTES_MAX = 16 << 20
_NOTE = b": baton "
_DATA = b"data:"


class ResumedChoice(msgspec.Struct, frozen=True):
    """A choice that is resumed: its index, and the tokens that were streamed already."""

    index: Annotated[int, Meta(ge=0)]
    tokens: tuple[int, ...]


class RouterHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """The field `baton` of a request body; honoured from trusted callers, ignored from others."""

    id: Annotated[str, Meta(pattern=r"^[\w.:-]{0,128}$")] = ""
    """Of the response, the same on every attempt."""
    created: Annotated[int, Meta(ge=0, le=2**53)] = 0
    tokens: bool = False
    """Whether a TokenNote goes before each data event."""
    resume: tuple[ResumedChoice, ...] = ()
    """One job each; all other choices are finished."""
    done: dict[Annotated[int, Meta(ge=0, le=2**31)], Annotated[int, Meta(ge=0, le=2**31)]] = {}
    """By choice that was finished in an earlier attempt: its number of tokens, for the usage."""
    first_token: Literal["", "prefill", "decode"] = ""
    """Which side's first token is streamed; empty: the instance's own setting."""


class TokenNote(msgspec.Struct, frozen=True):
    """What an event adds to a choice: tokens, and the finish reason if it ended."""

    index: int
    tokens: tuple[int, ...] = ()
    finish: str | None = None


class SentEvent(msgspec.Struct, frozen=True):
    """One block of a stream: its bytes without notes, the content of its data lines, and its note."""

    raw: bytes
    data: bytes | None
    note: TokenNote | None

    @property
    def is_done(self) -> bool:
        """Whether it is the proper end of the stream."""
        return self.data == b"[DONE]"


def data_event(payload: bytes) -> bytes:
    """One event; encoded JSON has no line feeds, so the data is one line."""
    return b"data: " + payload + b"\n\n"


def note_line(note: TokenNote) -> bytes:
    """The comment line that goes right before the event of the note."""
    return _NOTE + msgspec.json.encode(note) + b"\n"


class EventReader:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SentEvent]:
        """The events that these bytes complete; a block of comments alone is an event without data."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ApiError(502, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this Baton?")
        for block in blocks:
            if block.strip():
                yield _read(block)


def _read(block: bytes) -> SentEvent:
    stop = block.find(b"\n")
    if block.startswith(_NOTE) and block.startswith(_DATA, stop + 1) and block.find(b"\n", stop + 1) < 0:
        # The usual block: a note and one line of data.
        line = block[stop + 1 :]
        return SentEvent(line + b"\n\n", line[len(_DATA) :].lstrip(b" "), _read_note(block[:stop]))
    lines = block.split(b"\n")
    kept = [line for line in lines if not line.startswith(_NOTE)]
    note = None
    for line in lines:
        if line.startswith(_NOTE):
            note = _read_note(line)
    data = [line[len(_DATA) :].lstrip(b" ") for line in kept if line.startswith(_DATA)]
    raw = b"\n".join(kept) + b"\n\n" if kept else b""
    return SentEvent(raw, b"\n".join(data) if data else None, note)


def _read_note(line: bytes) -> TokenNote:
    try:
        return _notes.decode(line[len(_NOTE) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(502, f"a token note cannot be read ({error}); is this Baton?") from None


_notes = msgspec.json.Decoder(TokenNote)
