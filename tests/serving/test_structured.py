"""Structured outputs over HTTP: the same behind a hand-over, in a stream and over a resume; bad ones refused.

The model's weights are random: without a mask nothing that it says is JSON.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from tests.engine.text.vocabularies import byte_level
from tests.serve.speaking import model as tiny_model
from tests.serving.live import Live, live
from tests.serving.streams import listen
from tests.serving.test_server_handoff import ask_both
from tests.serving.test_tool_calls import TEMPLATE
from tokenizers import AddedToken

from baton.serving.http import EventSplitter

pytestmark = pytest.mark.serve

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog", "<|endoftext|>"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["animal", "legs", "names"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}
BODY = {"prompt": "the quick brown fox", "max_tokens": 400, "temperature": 0.9}
MESSAGES = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 400, "temperature": 0.9}
ARGUMENTS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
ARGUMENTS |= {"$defs": {"city": {"enum": ["Oslo", "Rome"]}}, "additionalProperties": False}
PARAMETERS = {"weather": ARGUMENTS, "time": {"type": "object", "additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live]]:
    """Prefill in two stages and decode in two shards, of a model whose template has calls."""
    where = tmp_path_factory.mktemp("structured") / "model"
    shutil.copytree(tiny_model(), where)
    backend = copy.deepcopy(byte_level())
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    backend.chat_template = TEMPLATE
    backend.save_pretrained(where)
    sides = {
        "model": str(where),
        "secret": b"a secret of both sides",
        "is_warmed": False,
        "context_max": 1024,
    }
    with (
        live(role="prefill", name="source", layout="pp2", **sides) as prefill,
        live(role="decode", name="target", layout="tp2", **sides) as decode,
    ):
        yield prefill, decode


def check_animal(text: str) -> None:
    jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_a_handoff_changes_nothing(pair: tuple[Live, Live]):
    decode = pair[1]
    for seed in range(2):
        body = {**BODY, **FORMAT, "seed": seed, "n": 1 + seed, "return_token_ids": True}
        combined = decode.ask(COMPLETIONS, body).json["choices"]
        handed = ask_both(pair, COMPLETIONS, body)[1].json["choices"]
        assert handed == combined
        for choice in handed:
            assert choice["finish_reason"] == "stop"
            check_animal(choice["text"])
        with pytest.raises(json.JSONDecodeError):  # without the format it is junk
            check_animal(decode.ask(COMPLETIONS, {**BODY, "seed": seed}).json["choices"][0]["text"])


def test_every_field_that_gives_a_format(pair: tuple[Live, Live]):
    def said(path: str, body: dict[str, Any]) -> str:
        answer = pair[1].ask(path, body)
        assert answer.status == 200, answer.text
        return answer.json["text"] if path == GENERATE else answer.json["choices"][0]["text"]

    check_animal(said(COMPLETIONS, {**BODY, "structured_outputs": {"json": SCHEMA}}))
    check_animal(said(COMPLETIONS, {**BODY, "structured_outputs": {"json": json.dumps(SCHEMA)}}))
    assert said(COMPLETIONS, {**BODY, "structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert said(COMPLETIONS, {**BODY, "structured_outputs": {"regex": "[ab]{3}"}}).strip("ab") == ""
    assert (
        said(COMPLETIONS, {**BODY, "structured_outputs": {"grammar": 'root ::= "x" root | "y"'}})[-1] == "y"
    )
    params = {"max_new_tokens": 400, "json_schema": json.dumps(SCHEMA)}
    check_animal(said(GENERATE, {"text": "the fox", "sampling_params": params}))
    assert said(GENERATE, {"text": "the fox", "sampling_params": {"regex": "[ab]{3}"}}).strip("ab") == ""
    text = {"response_format": {"type": "text"}}
    assert said(COMPLETIONS, {**BODY, **text, "seed": 3}) == said(COMPLETIONS, {**BODY, "seed": 3})
    biased = {"logit_bias": {str(byte_level().encode("}")[0]): 20}}
    chat = {**MESSAGES, **biased, "response_format": {"type": "json_object"}}
    (choice,) = pair[1].ask(CHAT, chat).json["choices"]
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_stream_and_every_resume_of_it(pair: tuple[Live, Live]):
    decode, body = pair[1], {**BODY, **FORMAT, "seed": 6}
    whole = listen(decode, COMPLETIONS, body).choices[0]
    check_animal(whole.text)
    assert whole.text == decode.ask(COMPLETIONS, body).json["choices"][0]["text"]
    for cut in range(1, len(whole.tokens), 1 + len(whole.tokens) // 4):
        resume = [{"index": 0, "tokens": whole.tokens[:cut]}]
        rest = listen(decode, COMPLETIONS, body, resume=resume, id="cmpl-a").choices[0]
        assert whole.tokens[:cut] + rest.tokens == whole.tokens
        assert rest.finish == "stop"


def test_max_tokens_cuts_it_off(pair: tuple[Live, Live]):
    (choice,) = pair[1].ask(COMPLETIONS, {**BODY, **FORMAT, "max_tokens": 4}).json["choices"]
    assert choice["finish_reason"] == "length"


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    "more", [{"tool_choice": "required"}, {"tool_choice": NAMED}], ids=["required", "named"]
)
def test_calls_are_forced(pair: tuple[Live, Live], more: dict[str, Any]):
    for seed in range(2):
        body = {**MESSAGES, "tools": TOOLS, "seed": seed, **more}
        (choice,) = ask_both(pair, CHAT, body)[1].json["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        for call in calls:
            jsonschema_rs.validate(PARAMETERS[call["name"]], json.loads(call["arguments"]))
        if more["tool_choice"] == NAMED:
            assert [call["name"] for call in calls] == ["weather"]
        events = [
            event.data for event in EventSplitter().feed(pair[1].ask(CHAT, {**body, "stream": True}).body)
        ]
        choices = [json.loads(event)["choices"][0] for event in events if event != b"[DONE]"]
        streamed = [call for each in choices for call in each["delta"].get("tool_calls", [])]
        assert [call["function"] for call in streamed] == calls
        assert choices[-1]["finish_reason"] == "tool_calls"


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}


@pytest.mark.parametrize(
    ("path", "more", "param", "problem"),
    [
        (COMPLETIONS, {"response_format": BAD_SCHEMA}, "response_format", "Invalid type: objekt"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            COMPLETIONS,
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "json_object or json_schema",
        ),
        (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "truncated"),
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (COMPLETIONS, {"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar", "Lark or GBNF"),
        (
            COMPLETIONS,
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "use",
        ),
        (
            COMPLETIONS,
            {**FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "already",
        ),
        (COMPLETIONS, {**FORMAT, "ignore_eos": True}, "ignore_eos", "ends where its format does"),
        (COMPLETIONS, {**FORMAT, "min_tokens": 3}, "min_tokens", "ends where its format does"),
        (COMPLETIONS, {"guided_json": SCHEMA}, "guided_json", "use response_format or structured_outputs"),
        (GENERATE, {"sampling_params": {"regex": "("}}, "sampling_params.regex", "unclosed group"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "use none, auto, required"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "not the name of one"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", **FORMAT}, "tool_choice", "already"),
    ],
)
def test_bad_formats_are_refused(
    pair: tuple[Live, Live], path: str, more: dict[str, Any], param: str, problem: str
):
    body = {COMPLETIONS: BODY, CHAT: MESSAGES, GENERATE: {"text": "a"}}[path]
    answer = pair[1].ask(path, {**body, **more})
    assert answer.status == 400, answer.text
    assert answer.json["error"]["param"] == param, answer.text
    assert problem in answer.json["error"]["message"], answer.text


def test_tokens_outside_the_grammar_fail_the_request_alone(pair: tuple[Live, Live]):
    """An instance that resumes an answer of another format would otherwise go on with junk."""
    decode, body = pair[1], {**BODY, **FORMAT}
    resume = {"baton": {"resume": [{"index": 0, "tokens": [9, 9]}]}}
    for answer in (
        decode.ask(COMPLETIONS, {**body, **resume}),
        ask_both(pair, COMPLETIONS, {**body, **resume})[1],
    ):
        assert answer.status == 502, answer.text
        assert "in its format" in answer.json["error"]["message"]
    check_animal(decode.ask(COMPLETIONS, body).json["choices"][0]["text"])
