"""Streams as a router reads them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.serving.live import WAIT_S_MAX, Live

from baton.serving.http import EventSplitter, SentEvent


@dataclass
class Heard:
    """What a choice had grown to, event by event."""

    tokens: list[int] = field(default_factory=list)
    texts: list[tuple[int, str]] = field(default_factory=list)
    """After so many tokens: the text so far."""
    finish: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return self.texts[-1][1] if self.texts else ""

    def text_at(self, num_tokens: int) -> str | None:
        """What had been said with so many tokens; None where no event ended there."""
        return next((text for count, text in reversed(self.texts) if count == num_tokens), None)


@dataclass
class Stream:
    """A whole stream."""

    choices: dict[int, Heard]
    roles: dict[int, int]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    is_done: bool


def listen(served: Live, path: str, body: dict[str, Any], **private: Any) -> Stream:
    """Asks with notes, and reads everything."""
    answer = served.ask(path, {**body, "stream": True, "baton": {"tokens": True, **private}})
    assert answer.status == 200, answer.text
    return heard(list(EventSplitter().feed(answer.body)))


def heard(events: list[SentEvent]) -> Stream:
    """What events come to."""
    found = Stream({}, {}, None, None, events[-1].is_done)
    for event in events:
        if event.is_done:
            continue
        data = json.loads(event.data)
        found.error = data.get("error") or found.error
        found.usage = data.get("usage") or found.usage
        for choice in data.get("choices", ()):
            index = choice["index"]
            assert event.note is not None
            assert event.note.index == index
            choices = found.choices.setdefault(index, Heard())
            delta = choice.get("delta") or {"content": choice.get("text")}
            found.roles[index] = found.roles.get(index, 0) + ("role" in delta)
            choices.tokens += event.note.tokens
            choices.texts.append((len(choices.tokens), choices.text + (delta.get("content") or "")))
            choices.finish = choice["finish_reason"]
            assert choices.finish == event.note.finish
    return found


@contextmanager
def half_read(served: Live, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has asked, from which nobody has read."""
    host, port = served.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), WAIT_S_MAX) as connection:
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", "", ""]
        connection.sendall("\r\n".join(head).encode() + raw)
        yield connection
