"""Server-sent events, out and in, and the notes that travel between them as comments.

A client of OpenAI's API passes over lines that begin with a colon. So what a router has to know of each event
(its tokens, to go on elsewhere should this instance fail) is such a line before it, in the same block, and
the rest can be forwarded without a look.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.web.problems import Problem

DONE = b"data: [DONE]\n\n"
EVENT_BYTES_MAX = 16 << 20
_NOTE = b": baton "
_DATA = b"data:"


class Note(msgspec.Struct, frozen=True):
    """What an event adds to a choice: tokens, and why it ended if it did."""

    index: int
    tokens: tuple[int, ...] = ()
    finish: str | None = None


class SentEvent(msgspec.Struct, frozen=True):
    """One block of a stream: its bytes without notes, what its data lines say, and its note."""

    raw: bytes
    data: bytes | None
    note: Note | None

    @property
    def is_done(self) -> bool:
        """Whether it is the stream's proper end."""
        return self.data == b"[DONE]"


def data_event(payload: bytes) -> bytes:
    """One event; JSON has no line feeds of its own, so the data is one line."""
    return b"data: " + payload + b"\n\n"


def note_line(note: Note) -> bytes:
    """What is written right before the event that it belongs to."""
    return _NOTE + msgspec.json.encode(note) + b"\n"


class EventReader:
    """Events from bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SentEvent]:
        """The events that these bytes complete; comments alone are one too, without data."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise Problem(502, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this Baton?")
        for block in blocks:
            if block.strip():
                yield _read(block)


def _read(block: bytes) -> SentEvent:
    stop = block.find(b"\n")
    if block.startswith(_NOTE) and block.startswith(_DATA, stop + 1) and block.find(b"\n", stop + 1) < 0:
        # A note and one line of data, as nearly all are.
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


def _read_note(line: bytes) -> Note:
    try:
        return _notes.decode(line[len(_NOTE) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(502, f"a note cannot be read ({error}); is this Baton?") from None


_notes = msgspec.json.Decoder(Note)
