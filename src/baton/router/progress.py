"""What a client has been streamed so far, so that another instance can go on from there."""

from __future__ import annotations

import msgspec

from baton.web import EventReader, Note, Resumed

_ERROR = b'{"error"'


class Progress:
    """The tokens of every choice, over all attempts."""

    def __init__(self, num_choices: int) -> None:
        self._tokens: dict[int, list[int]] = {index: [] for index in range(num_choices)}
        self._done: dict[int, int] = {}
        self.has_usage = False
        """Whether the client has what comes after the last choice."""

    def add(self, note: Note) -> None:
        """An event has been read, whose tokens the client is about to get."""
        tokens = self._tokens.get(note.index)
        if tokens is None:
            return
        tokens.extend(note.tokens)
        if note.finish is not None:
            self._done[note.index] = len(tokens)

    def has_begun(self, index: int) -> bool:
        """Whether the client has a token of this choice."""
        return bool(self._tokens.get(index))

    @property
    def resume(self) -> tuple[Resumed, ...]:
        """The choices that are not finished, and how far they are."""
        return tuple(
            Resumed(index, tuple(tokens)) for index, tokens in self._tokens.items() if index not in self._done
        )

    @property
    def done(self) -> dict[int, int]:
        """By choice that is finished: how many tokens it has."""
        return dict(self._done)

    @property
    def is_finished(self) -> bool:
        """Whether every choice is."""
        return len(self._done) == len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Of all choices that are not finished: what has to be computed again to go on."""
        return sum(len(tokens) for index, tokens in self._tokens.items() if index not in self._done)


class Cut(msgspec.Struct, frozen=True):
    """What came of a piece of a stream: bytes for the client, and the error event that ended it."""

    out: bytes
    error: bytes | None
    is_done: bool


class Cutter:
    """Takes the notes out of one attempt's stream; only whole events go on to the client.

    What comes before a choice's first token (its role) is held until that token: whoever goes on with a
    choice that has no tokens begins it, and a client is to see one beginning.
    """

    def __init__(self, progress: Progress, num_answers: int) -> None:
        self._progress = progress
        self._num_answers = num_answers
        self._reader = EventReader()
        self._num_tokens: dict[int, int] = {}
        self._admitted: set[int] = set()
        self._held: dict[int, bytes] = {}

    def feed(self, data: bytes) -> Cut:
        """The whole events that these bytes complete."""
        out: list[bytes] = []
        for event in self._reader.feed(data):
            if event.note is not None:
                out.append(self._noted(event.note, event.raw))
            elif event.data is not None and event.data.startswith(_ERROR):
                return Cut(b"".join(out), event.data, False)
            else:
                out.append(event.raw)
                self._progress.has_usage |= event.data is not None and self._progress.is_finished
            if event.is_done:
                return Cut(b"".join(out), None, True)
        return Cut(b"".join(out), None, False)

    def are_admitted(self, num_jobs: int) -> bool:
        """Whether decode has every job's cache: it went beyond the first token, which comes before that."""
        return len(self._admitted) >= num_jobs

    def _noted(self, note: Note, raw: bytes) -> bytes:
        """What of this event, and of those held before it, the client is given now."""
        held = self._held.pop(note.index, b"")
        if not note.tokens and note.finish is None and not self._progress.has_begun(note.index):
            self._held[note.index] = held + raw
            return b""
        self._note(note)
        return held + raw

    def _note(self, note: Note) -> None:
        self._progress.add(note)
        num_tokens = self._num_tokens.get(note.index, 0) + len(note.tokens)
        self._num_tokens[note.index] = num_tokens
        if num_tokens > 1 or note.finish is not None:
            self._admitted.add(note.index // self._num_answers)
