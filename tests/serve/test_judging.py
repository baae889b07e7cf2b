"""The judge of the load tests: it passes right answers, and catches every way in which one can be wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.serve.judging import DONE, Fate, Judge, Reply
from tests.serve.questions import CHAT, COMPLETIONS, Question
from tests.serve.speaking import Expected

FOX = Expected((5, 6, 7), "a fox", "length", 1.0)
DOG = Expected((8, 0), "dog", "stop", 1.0)
BODY = {"model": "tiny", "prompt": ["x", "y"]}
ASKED = Question("batch", COMPLETIONS, BODY, (FOX, DOG), 2)
STREAMED = replace(ASKED, body={**BODY, "stream": True, "stream_options": {"include_usage": True}})
BAD = Question("bad", COMPLETIONS, {}, statuses=(400,))
USAGE = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
ERROR = {"error": {"message": "no", "type": "x", "param": None, "code": "PEER_LOST"}}


def whole(**changes: Any) -> Reply:
    choices = [
        {"index": index, "text": each.text, "finish_reason": each.finish}
        for index, each in enumerate((FOX, DOG))
    ]
    body = {"choices": choices, "usage": USAGE, **changes}
    return Reply(0.0, 200, body=json.dumps(body).encode())


def events(*pieces: Any) -> Reply:
    lines = [piece if isinstance(piece, str) else json.dumps(piece) for piece in pieces]
    return Reply(0.0, 200, body="".join(f"data: {line}\n\n" for line in lines).encode())


def piece(index: int, text: str, finish: str | None = None, name: str = "cmpl-1") -> dict[str, Any]:
    return {"id": name, "choices": [{"index": index, "text": text, "finish_reason": finish}]}


A_FOX = [piece(0, "a "), piece(0, "fox"), piece(0, "", "length")]
A_DOG = [piece(1, "dog", "stop")]
THE_USAGE = {"id": "cmpl-1", "choices": [], "usage": USAGE}
RIGHT = [*A_FOX, *A_DOG, THE_USAGE, DONE]


def refused(status: int, body: Any, **headers: str) -> Reply:
    return Reply(0.0, status, headers=headers, body=json.dumps(body).encode())


@pytest.mark.parametrize(
    ("question", "reply", "fate"),
    [
        (ASKED, whole(), Fate.RIGHT),
        (STREAMED, events(*RIGHT), Fate.RIGHT),
        (STREAMED, events(*A_DOG, *A_FOX, THE_USAGE, DONE), Fate.RIGHT),
        (BAD, refused(400, ERROR), Fate.REFUSED),
        (ASKED, refused(429, ERROR, **{"Retry-After": "1"}), Fate.BUSY),
        (ASKED, refused(502, ERROR), Fate.FAILED),
        (STREAMED, events(*A_DOG, ERROR, DONE), Fate.FAILED),
        (STREAMED, events(*A_DOG, ERROR), Fate.FAILED),
        (ASKED, Reply(0.0, trouble="reset"), Fate.BROKEN),
        (ASKED, Reply(0.0, has_left=True), Fate.LEFT),
    ],
)
def test_fates(question: Question, reply: Reply, fate: Fate) -> None:
    found = Judge().verdict(question, reply)
    assert found.fate is fate, found.why


@pytest.mark.parametrize(
    ("question", "reply", "why"),
    [
        (ASKED, whole(usage={**USAGE, "completion_tokens": 4}), "usage has 4 answer tokens, not 5"),
        (ASKED, whole(usage={**USAGE, "prompt_tokens": 3}), "usage has 3 prompt tokens, not 2"),
        (ASKED, whole(usage={**USAGE, "total_tokens": 9}), "does not add up"),
        (ASKED, whole(choices=[]), "choices \\[\\] of 2"),
        (ASKED, Reply(0.0, 200, body=b"{}"), "not in OpenAI's form"),
        (replace(ASKED, choices=(DOG, DOG)), whole(), "choice 0 is 'a fox'"),
        (replace(ASKED, choices=(FOX, replace(DOG, finish="length"))), whole(), "choice 1 is 'dog'"),
        (STREAMED, events(*A_FOX, *A_DOG, THE_USAGE), "without \\[DONE\\]"),
        (STREAMED, events(*A_FOX, *A_DOG, DONE), "no usage"),
        (STREAMED, events(*A_FOX, THE_USAGE, DONE), "finish reasons"),
        (STREAMED, events(*RIGHT, piece(0, "x")), "goes on after \\[DONE\\]"),
        (STREAMED, events(*A_FOX, *A_FOX, *A_DOG, THE_USAGE, DONE), "goes on after its end"),
        (STREAMED, events(*A_FOX[1:], *A_DOG, THE_USAGE, DONE), "choice 0 is 'fox'"),
        (STREAMED, events(*A_FOX[:1], *RIGHT), "choice 0 is 'a a fox'"),
        (STREAMED, events(*A_FOX, piece(1, "dog", "stop", "cmpl-2"), THE_USAGE, DONE), "ids "),
        (STREAMED, events(*A_DOG, {"error": "lost"}, DONE), "no error in OpenAI's form"),
        (STREAMED, events(piece(1, "cat"), ERROR, DONE), "not the beginning of"),
        (BAD, whole(), "answered though it is bad"),
        (BAD, refused(404, ERROR), "404"),
        (ASKED, refused(400, ERROR), "400"),
        (ASKED, refused(502, {"detail": "lost"}), "no error in OpenAI's form"),
        (BAD, refused(400, {"error": {**ERROR["error"], "message": ""}}), "without words"),
    ],
)
def test_what_is_wrong_is_said(question: Question, reply: Reply, why: str) -> None:
    found = Judge().verdict(question, reply)
    assert found.fate is Fate.WRONG
    assert re.search(why, found.why), found.why


def test_a_chat_is_read_from_its_deltas() -> None:
    asked = Question("plain", CHAT, {"stream": True}, (FOX,), 2)
    first = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    rest = {"id": "c", "choices": [{"index": 0, "delta": {"content": "a fox"}, "finish_reason": "length"}]}
    assert Judge().verdict(asked, events(first, rest, DONE)).fate is Fate.RIGHT
    assert Judge().verdict(asked, events(first, rest, rest, DONE)).fate is Fate.WRONG


def test_seeded_answers_have_to_agree() -> None:
    judge = Judge()
    asked = Question("seeded", COMPLETIONS, BODY, (), 2, seeded="one", num_sampled=2)
    assert judge.verdict(asked, whole()).fate is Fate.RIGHT
    assert judge.verdict(asked, whole()).fate is Fate.RIGHT
    other = whole(choices=[{"index": index, "text": "b", "finish_reason": "stop"} for index in range(2)])
    assert judge.verdict(asked, other).fate is Fate.WRONG
    assert judge.verdict(replace(asked, seeded="two"), other).fate is Fate.RIGHT
