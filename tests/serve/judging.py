"""Judges what came of a question: right, refused, left, or a finding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.serve.questions import Question
from tests.serve.speaking import Expected

DONE = "[DONE]"
BUSY = (429, 503)
FAILED = (500, 502, 503, 504)


class Fate(Enum):
    """What became of a request."""

    RIGHT = "right"
    REFUSED = "refused as it should be"
    LEFT = "left by its client"
    BUSY = "turned away with Retry-After"
    FAILED = "failed cleanly"
    BROKEN = "connection lost"
    WRONG = "wrong"


@dataclass
class Reply:
    """What a client saw of one request, with the times at which it saw it."""

    begun_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trouble: str = ""
    """Of the connection: it was refused, reset or cut."""
    has_left: bool = False
    ended_s: float = 0.0
    moments: list[float] = field(default_factory=list)
    """When bytes of the body came."""


@dataclass(frozen=True)
class Verdict:
    """What a request came to, and why it is wrong if it is."""

    fate: Fate
    why: str = ""


@dataclass
class Judge:
    """Holds replies against what was expected; it remembers sampled answers."""

    seeded: dict[str, list[str]] = field(default_factory=dict)

    def verdict(self, question: Question, reply: Reply) -> Verdict:
        """What came of one question."""
        if reply.has_left:
            return Verdict(Fate.LEFT)
        if reply.status == 0:
            return Verdict(Fate.BROKEN, reply.trouble)
        if reply.status != 200:
            return self._refusal(question, reply)
        if question.is_bad:
            return Verdict(Fate.WRONG, f"answered though it is bad: {reply.body[:200]!r}")
        try:
            return self._answer(question, reply)
        except (KeyError, IndexError, TypeError, ValueError) as cause:
            return Verdict(Fate.WRONG, f"not in OpenAI's form ({cause!r}): {reply.body[:400]!r}")

    def _refusal(self, question: Question, reply: Reply) -> Verdict:
        if reply.trouble:
            return Verdict(Fate.BROKEN, reply.trouble)
        why = form_of_error(reply.body)
        if why:
            return Verdict(Fate.WRONG, f"status {reply.status}: {why}")
        message = f"{reply.status}: {reply.body[:300].decode(errors='replace')}"
        if reply.status in question.statuses:
            return Verdict(Fate.REFUSED)
        if reply.status in BUSY and "Retry-After" in reply.headers:
            return Verdict(Fate.BUSY, message)
        if reply.status in FAILED:
            return Verdict(Fate.FAILED, message)
        return Verdict(Fate.WRONG, message)

    def _answer(self, question: Question, reply: Reply) -> Verdict:
        num_choices = len(question.choices) or question.num_sampled
        if question.is_stream:
            told = Told.of_stream(reply.body, question.is_chat, num_choices)
        else:
            if reply.trouble:
                return Verdict(Fate.BROKEN, reply.trouble)
            told = Told.of_body(json.loads(reply.body), question.is_chat, num_choices)
        if told.error:
            why = form_of_error(json.dumps(told.error).encode()) or told.strays(question.choices)
            return Verdict(Fate.WRONG if why else Fate.FAILED, why or f"in its stream: {told.error}")
        if reply.trouble:
            return Verdict(Fate.BROKEN, reply.trouble)
        found = told.findings(question)
        if question.seeded:
            first = self.seeded.setdefault(question.seeded, told.texts)
            if first != told.texts:
                found.append(f"sampled {told.texts!r}, before {first!r}")
        else:
            found += told.differences(question.choices)
        return Verdict(Fate.WRONG, f"{'; '.join(found)}") if found else Verdict(Fate.RIGHT)


def form_of_error(body: bytes) -> str:
    """Why a body is no error in OpenAI's form; empty if it is one."""
    try:
        error = json.loads(body)["error"]
        known = {name: error[name] for name in ("message", "type", "param", "code")}
    except (ValueError, KeyError, TypeError) as cause:
        return f"no error in OpenAI's form ({cause!r}): {body[:200]!r}"
    if not isinstance(known["message"], str) or not known["message"] or not isinstance(known["type"], str):
        return f"an error without words: {known}"
    return ""


@dataclass
class Told:
    """An answer put together."""

    texts: list[str]
    finishes: list[str | None]
    usage: dict[str, Any] | None = None
    is_done: bool = True
    error: dict[str, Any] | None = None
    form: list[str] = field(default_factory=list)

    @classmethod
    def of_body(cls, body: dict[str, Any], is_chat: bool, num_choices: int) -> Told:
        """Of an answer in one piece."""
        choices = sorted(body["choices"], key=lambda each: each["index"])
        texts = [each["message"]["content"] if is_chat else each["text"] for each in choices]
        told = cls(texts, [each["finish_reason"] for each in choices], body["usage"])
        if [each["index"] for each in choices] != list(range(num_choices)):
            told.form.append(f"choices {[each['index'] for each in choices]} of {num_choices}")
        return told

    @classmethod
    def of_stream(cls, raw: bytes, is_chat: bool, num_choices: int) -> Told:
        """Of server-sent events; a choice that ends twice or goes on after its end is a finding."""
        told = cls([""] * num_choices, [None] * num_choices, None, is_done=False)
        ids = set()
        for event in events_of(raw):
            if told.is_done:
                told.form.append(f"goes on after {DONE}")
            if event == DONE:
                told.is_done = True
                continue
            piece = json.loads(event)
            if "error" in piece:
                told.error = piece
                continue
            ids.add(piece["id"])
            if piece.get("usage"):
                told.usage = piece["usage"]
            for choice in piece["choices"]:
                told._take(choice, is_chat)
        if len(ids) > 1:
            told.form.append(f"ids {ids}")
        return told

    def _take(self, choice: dict[str, Any], is_chat: bool) -> None:
        index = choice["index"]
        piece = choice["delta"].get("content") or "" if is_chat else choice["text"]
        if self.finishes[index] is not None and (piece or choice["finish_reason"]):
            self.form.append(f"choice {index} goes on after its end")
        self.texts[index] += piece
        self.finishes[index] = choice["finish_reason"] or self.finishes[index]

    def findings(self, question: Question) -> list[str]:
        """What is wrong whatever the text is."""
        found = list(self.form)
        if not self.is_done:
            found.append(f"the stream ends without {DONE}")
        if not all(self.finishes):
            found.append(f"finish reasons {self.finishes}")
        is_told = not question.is_stream or "stream_options" in question.body
        if is_told and self.usage is None:
            found.append("no usage")
        if self.usage is not None:
            found += _usage(self.usage, question)
        return found

    def strays(self, expected: Sequence[Expected]) -> str:
        """A text that is not the beginning of the right one: a stream may end early, not go wrong before."""
        for text, each in zip(self.texts, expected, strict=False):
            if not each.text.startswith(text):
                return f"{text!r} is not the beginning of {each.text!r}"
        return ""

    def differences(self, expected: Sequence[Expected]) -> list[str]:
        """Texts and finish reasons that are not those of the oracle."""
        return [
            f"choice {index} is {text!r} ({finish}), expected {each.text!r} ({each.finish})"
            for index, (text, finish, each) in enumerate(
                zip(self.texts, self.finishes, expected, strict=False)
            )
            if (text, finish) != (each.text, each.finish)
        ]


def _usage(usage: dict[str, Any], question: Question) -> list[str]:
    found = []
    if usage["prompt_tokens"] != question.num_prompt_tokens:
        found.append(f"usage has {usage['prompt_tokens']} prompt tokens, not {question.num_prompt_tokens}")
    num_tokens = sum(len(each.tokens) for each in question.choices)
    if question.choices and usage["completion_tokens"] != num_tokens:
        found.append(f"usage has {usage['completion_tokens']} answer tokens, not {num_tokens}")
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        found.append(f"usage does not add up: {usage}")
    return found


def events_of(raw: bytes) -> list[str]:
    """The data of every complete server-sent event."""
    found = []
    for block in raw.decode().replace("\r\n", "\n").split("\n\n")[:-1]:
        data = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if data:
            found.append("\n".join(data))
    return found
