"""Tool calls: out of text that comes in pieces, whole or as a stream, and over a resumed stream."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.engine import tiny
from tests.engine.text.vocabularies import byte_level
from tests.serve.speaking import model as tiny_model
from tests.serving.live import live
from tests.serving.parsed import NEAR, read
from tests.serving.test_server_handoff import ask_both
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from baton.engine.tokenizer import AnswerText, Tokenizer
from baton.serving.http import ApiError, EventSplitter
from baton.serving.openai import (
    ChoiceDelta,
    ParsedRequest,
    ServedModel,
    Usage,
    parse_request,
    response_format,
)
from baton.serving.tool_calls import FORMS, ToolCallParser

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} answer with <tool_call>{}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROME = '<tool_call>{"arguments": "{\\"city\\": \\"Rome\\"}", "name": "weather"}</tool_call>'
CALLS = [("weather", '{"city":"Oslo"}'), ("weather", '{"city": "Rome"}')]
CASES = {
    "plain text < and </tool_call> ": ("plain text < and </tool_call> ", []),
    OSLO: ("", CALLS[:1]),
    f"Let me see.\n\n{OSLO}\n{ROME}\n": ("Let me see.", CALLS),
    f"{ROME} done.": (" done.", CALLS[1:]),
    OSLO.removesuffix("</tool_call>"): ("", CALLS[:1]),
    # What is no call stays as it is.
    OSLO[:40]: (OSLO[:40], []),
    "<tool_call>{oops}</tool_call>!": ("<tool_call>{oops}</tool_call>!", []),
    '<tool_call>{"name": 5}</tool_call>': ('<tool_call>{"name": 5}</tool_call>', []),
    "<<tool_call": ("<<tool_call", []),
}


def pieces(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(9)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("text", CASES)
def test_calls_do_not_depend_on_how_the_text_was_cut(text: str):
    chance = random.Random(4)
    for _ in range(200):
        parser, content, calls = ToolCallParser(FORMS["hermes"]), "", []
        for part in (*(parser.push(piece) for piece in pieces(text, chance)), parser.finish()):
            content += part[0]
            calls += part[1]
        assert (content, [(call.function.name, call.function.arguments) for call in calls]) == CASES[text]
        assert [call.index for call in calls] == list(range(len(calls)))
        assert len({call.id for call in calls}) == len(calls)


def tokenizer() -> Tokenizer:
    backend = copy.deepcopy(byte_level())
    backend.chat_template = TEMPLATE
    return Tokenizer(backend)


def served() -> ServedModel:
    return ServedModel("m", tokenizer(), 4096, 432, lambda num_prompt: 4096)


def parsed(**more: Any) -> ParsedRequest:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **more}
    model = served()
    return asyncio.run(parse_request(read("chat", body), NEAR, model))


def streamed(request: ParsedRequest, texts: list[str]) -> tuple[str, list[Any], list[str]]:
    """The content, the calls and the reasons to finish that a client reads."""
    form, content, calls, reasons = response_format(request, served()), "", [], []
    for place, text in enumerate(texts):
        delta = ChoiceDelta(0, place == 0, text, finish="stop" if place == len(texts) - 1 else None)
        form.take(delta)
        choice = msgspec.to_builtins(form.event(delta))["choices"][0]
        content += choice["delta"].get("content", "")
        calls += choice["delta"].get("tool_calls", [])
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return content, calls, reasons


def test_a_stream_and_a_whole_answer_have_the_same_calls():
    text = f"Let me see.\n{OSLO}\n{ROME}"
    content, calls, reasons = streamed(parsed(stream=True), list(text))
    assert (content, reasons) == ("Let me see.", ["tool_calls"])
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLS
    assert [(call["index"], call["type"]) for call in calls] == [(0, "function"), (1, "function")]
    (single,) = streamed(parsed(stream=True, parallel_tool_calls=False), list(text))[1]
    assert single["function"] == calls[0]["function"]
    request = parsed()
    form, delta = response_format(request, served()), ChoiceDelta(0, True, OSLO)
    delta.finish = "stop"
    form.take(delta)
    choice = msgspec.to_builtins(form.whole([delta], Usage(1, 1, 2)))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert "index" not in call


def test_another_instance_goes_on_in_the_middle_of_a_call():
    text = f"I see.\n{OSLO}\n{ROME}"
    ids = tokenizer().encode(text)
    for num in range(len(ids)):
        begun = tokenizer().decode(ids[:num])
        resume = {"baton": {"id": "x", "resume": [{"index": 0, "tokens": ids[:num]}]}}
        second = streamed(parsed(stream=True, **resume), list(text[len(begun) :]))
        # What the first instance held back was never sent.
        kept = ToolCallParser(FORMS["hermes"]).push(begun)
        assert kept[0] + second[0] == "I see."
        arguments = [call.function.arguments for call in kept[1]] + [
            call["function"]["arguments"] for call in second[1]
        ]
        assert arguments == [call[1] for call in CALLS]
        assert [call["index"] for call in second[1]] == list(range(2 - len(second[1]), 2))
        assert second[2] == ["tool_calls"]


MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'


def special_model(**more: Any) -> ServedModel:
    """A model whose tags are special tokens."""
    backend = copy.deepcopy(byte_level())
    tags = [AddedToken(text, special=True, normalized=False) for text in ("[TOOL_CALLS]", "[ARGS]")]
    backend.add_tokens([*tags, AddedToken("[OTHER]", special=True, normalized=False)], special_tokens=True)
    backend.chat_template = TEMPLATE.replace("<tool_call>{}</tool_call>", "[TOOL_CALLS]")
    return ServedModel("m", Tokenizer(backend), 4096, 440, lambda num_prompt: 4096, **more)


def test_tags_that_are_special_tokens_are_seen_and_resumed():
    model = special_model()
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "stream": True}
    ids = model.tokenizer.encode(f"I see. {MISTRAL}[OTHER]", add_special=False)
    for num in range(len(ids)):
        first = asyncio.run(parse_request(read("chat", body), NEAR, model))
        resume = {"baton": {"id": "x", "resume": [{"index": 0, "tokens": ids[:num]}]}}
        second = asyncio.run(parse_request(read("chat", {**body, **resume}), NEAR, model))
        content, calls = "", []
        for request, tokens, known in ((first, ids[:num], []), (second, ids[num:], ids[:num])):
            text = AnswerText(model.tokenizer, request.jobs[0].request.params, (), request.prompts[0])
            for token in known:
                text.push(token)
            form = response_format(request, model)
            for token in tokens:
                delta = ChoiceDelta(0, False, text.push(token))
                form.take(delta)
                content += delta.text
                calls += delta.calls
        assert content == "I see."
        assert [call.function.arguments for call in calls] == ['{"city":"Oslo"}', '{"city":"Rome"}']
        assert [call.index for call in calls] == [0, 1]


def test_special_tokens_are_text_where_the_request_wants_them():
    model = special_model(tool_call_parser="none")
    for more, kept in (({"skip_special_tokens": False}, False), ({}, True)):
        body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **more}
        params = asyncio.run(parse_request(read("chat", body), NEAR, model)).jobs[0].request.params
        assert (params.skip_special_tokens, params.shown_special_ids) == (kept, ())
    params = read("generate", {"text": "a", "sampling_params": {"skip_special_tokens": False}})
    assert asyncio.run(parse_request(params, NEAR, model)).jobs[0].request.params.skip_special_tokens is False


def test_a_parser_can_be_named_and_turned_off():
    model = special_model(tool_call_parser="hermes")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    for parser, text, num_calls in (("auto", OSLO, 0), ("hermes", OSLO, 1), ("none", OSLO, 0)):
        model = special_model(tool_call_parser=parser)
        request = asyncio.run(parse_request(read("chat", body), NEAR, model))
        delta = ChoiceDelta(0, True, text, finish="stop")
        response_format(request, model).take(delta)
        assert (len(delta.calls), delta.text) == (num_calls, "" if num_calls else text)
    with pytest.raises(ApiError, match="--tool-call-parser none"):
        asyncio.run(parse_request(read("chat", {**body, "tool_choice": "required"}), NEAR, model))


def test_arguments_in_messages_are_text_where_the_template_adds_them():
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    for template in (
        "{% for m in messages %}{% for t in m.tool_calls %}{{ t['function']['arguments'] + ';' }}{% endfor %}"
        "{% endfor %}",
        "{% for m in messages %}{% for t in m.tool_calls %}{{ t.function.arguments | tojson }};{% endfor %}"
        "{% endfor %}",
    ):
        model = special_model()
        model.tokenizer._backend.chat_template = template
        request = asyncio.run(parse_request(read("chat", {"messages": messages}), NEAR, model))
        assert model.decode(request.prompts[0]) == '{"city": "Oslo"};'


def test_tools_are_shown_and_calls_parsed_unless_the_choice_is_none():
    with_tools, without = parsed(), parsed(tool_choice="none")
    assert streamed(with_tools, [OSLO])[0] == ""
    assert len(without.prompts[0]) < len(with_tools.prompts[0])
    assert streamed(without, [OSLO])[:2] == (OSLO, [])
    assert parsed(tool_choice="auto").prompts == with_tools.prompts
    with pytest.raises(ApiError, match="5: expected") as refused:
        parsed(tool_choice=5)
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


HERMES_PARTS = ['<tool_call>{"name": "weather", ', '"arguments": {"city"', ': "Oslo"}}', "</tool_call>"]
MISTRAL_PARTS = ["[TOOL_CALLS]", "weather[ARGS]", '{"city"', ': "Oslo"}']


def calling_model(folder: Path, parts: list[str]) -> tuple[Path, list[dict[str, str]], int]:
    """A checkpoint whose answer to a chat is a call, the chat, and the token after the call.

    Its weights are random; the tokens that it happens to answer with are spelled as the parts of a call.
    """
    where = folder / "calling"
    shutil.copytree(tiny_model(), where)
    network = tiny._loaded(str(tiny_model()))
    letters = dict(zip(string.printable, range(3, 3 + len(string.printable)), strict=True))
    for text in string.ascii_lowercase:
        vocabulary = {**letters, "<unk>": 0}
        chat = [{"role": "user", "content": text}]
        prompt = word_level(vocabulary, parts).apply_chat_template(chat, tools=TOOLS, return_dict=False)
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        answer = network.generate(ids, attention_mask=mask, max_new_tokens=len(parts) + 1, do_sample=False)
        tokens = answer[0, len(prompt) :].tolist()
        if len(set(tokens)) == len(parts) + 1 and not set(tokens) & set(vocabulary.values()):
            vocabulary |= dict(zip(parts, tokens, strict=False))
            word_level(vocabulary, parts).save_pretrained(where)
            return where, chat, tokens[-1]
    raise AssertionError("no prompt has an answer of tokens that can be spelled anew")


def word_level(vocabulary: dict[str, int], parts: list[str]) -> PreTrainedTokenizerFast:
    """Mistral's tag is a special token, Hermes' is text."""
    fast = Fast(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    is_special = parts is MISTRAL_PARTS
    if is_special and parts[0] in vocabulary:
        fast.add_special_tokens([AddedToken(parts[0], special=True)])
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>")
    # In a comment: the prompt is the same before the tag has a token and after.
    tag = "{# [TOOL_CALLS] #}" if is_special else "<tool_call>{}</tool_call>"
    backend.chat_template = TEMPLATE.replace("<tool_call>{}</tool_call>", tag)
    return backend


@pytest.mark.serve
@pytest.mark.parametrize("parts", [HERMES_PARTS, MISTRAL_PARTS], ids=["hermes", "mistral"])
def test_a_call_is_parsed_behind_a_handoff(tmp_path: Path, parts: list[str]):
    where, chat, after = calling_model(tmp_path, parts)
    sides = {"model": str(where), "secret": b"a secret of both sides", "is_warmed": False}
    body = {"messages": chat, "tools": TOOLS, "temperature": 0, "ignore_eos": True, "stop_token_ids": [after]}
    with (
        live(role="prefill", name="source", layout="pp2", **sides) as prefill,
        live(role="decode", name="target", **sides) as decode,
    ):
        for ask in (
            lambda more: decode.ask("/v1/chat/completions", {**body, **more}),
            lambda more: ask_both((prefill, decode), "/v1/chat/completions", {**body, **more})[1],
        ):
            (choice,) = ask({}).json["choices"]
            assert choice["finish_reason"] == "tool_calls", choice
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
            (choice,) = ask({"tool_choice": "none", "max_tokens": 5}).json["choices"]
            assert "tool_calls" not in choice["message"]
            events = [event.data for event in EventSplitter().feed(ask({"stream": True}).body)]
            choices = [json.loads(event)["choices"][0] for event in events if event != b"[DONE]"]
            assert "".join(each["delta"].get("content", "") for each in choices) == ""
            (call,) = (call for each in choices for call in each["delta"].get("tool_calls", []))
            assert (call["index"], call["function"]["arguments"]) == (0, '{"city":"Oslo"}')
            assert choices[-1]["finish_reason"] == "tool_calls"
