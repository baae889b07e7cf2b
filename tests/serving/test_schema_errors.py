"""Bodies: what is read, what is passed over, and what is refused with field, value and remedy."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from tests.serving.parsed import READERS, read

from baton.serving.http import STATUSES, ApiError
from baton.serving.openai import IGNORED, TOO_LONG, UNSUPPORTED

GOOD = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "generate": {"text": "a"},
}


def problem_of(kind: str, body) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(kind, body)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("kind", READERS)
def test_a_field_is_read_or_refused_or_on_the_list_of_those_without_effect(kind: str):
    assert not IGNORED & UNSUPPORTED.keys()
    own = type(read(kind, GOOD[kind])).__struct_fields__
    assert read(kind, {**GOOD[kind], **{name: [{"a": 1}] for name in IGNORED.difference(own)}})
    for name in ("temprature", "anything", "max_length", "", "x" * 1000, "\x00"):
        problem = problem_of(kind, {**GOOD[kind], name: None})
        assert (problem.param, problem.code) == (name[:80], "unknown_field")
    for name in ("sampling_params", "stream_options"):
        if name in own:
            problem = problem_of(kind, {**GOOD[kind], name: {"top": 1}})
            assert (problem.param, problem.code) == (f"{name}.top", "unknown_field")


def test_fields_of_other_engines_have_an_effect_or_are_known():
    """What vLLM's and SGLang's own clients and routers send with their defaults."""
    vllm = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_tokens": 0}
    vllm |= {"ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    vllm |= {"use_beam_search": False, "add_special_tokens": False, "priority": 0, "request_id": "r"}
    vllm |= {"include_stop_str_in_output": False, "prompt_logprobs": None, "kv_transfer_params": None}
    sglang = {"no_stop_trim": False, "stop_regex": None, "lora_path": None, "session_params": None}
    sglang |= {"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False}
    sglang |= {"stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    for kind in ("completions", "chat"):
        assert read(kind, {**GOOD[kind], **vllm, **sglang})
    params = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "json_schema": None}
    assert read("generate", {"text": "a", "logprob_start_len": -1, "sampling_params": params})


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "a", "n": "two"}, "n", "n is 'two': expected int"),
        ({"prompt": "a", "n": 0}, "n", "n is 0: expected int >= 1"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature is -1: expected float >= 0"),
        ({"prompt": "a", "top_p": 1.5}, "top_p", "top_p is 1.5"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias[...]", "101"),
        ({"prompt": [1, -2]}, "prompt[1]", "prompt[1] is -2"),
        ({"prompt": {"a": 1}}, "prompt", "expected str | array"),
        ({"prompt": "a", "stream_options": {"include_usage": 3}}, "stream_options.include_usage", "is 3"),
        ({"prompt": "a", "bootstrap_room": 2**63}, "bootstrap_room", "expected int"),
        ({}, "prompt", "prompt is missing"),
        # Larger than what an order to a rank can hold: such a number must not reach the instance.
        ({"prompt": "a", "top_k": 2**64}, "top_k", "expected int <="),
        ({"prompt": "a", "max_tokens": 2**64}, "max_tokens", "expected int <="),
        ({"prompt": "a", "min_tokens": 2**63}, "min_tokens", "expected int <="),
    ],
)
def test_a_wrong_field_is_named_with_its_value(body, param: str, words: str):
    problem = problem_of("completions", body)
    assert problem.param == param
    assert words in problem.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": NaN}', b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes):
    assert problem_of("completions", body).code in ("no_json", "wrong_type")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("field", UNSUPPORTED)
def test_fields_that_would_change_the_answer_are_refused_unless_neutral(kind: str, field: str):
    neutral, _ = UNSUPPORTED[field]
    own = {"completions": ("echo", "add_special_tokens"), "generate": ("input_embeds",)}
    if field in own.get(kind, ()):
        return
    for value in neutral:
        read(kind, {**GOOD[kind], field: value})
    for value in ({"type": "json_object"}, "x", ["y"], 7, False in neutral):
        if not any(value == each and type(value) is type(each) for each in neutral):
            problem = problem_of(kind, {**GOOD[kind], field: value})
            assert (problem.param, problem.code) == (field, "unsupported")


def test_fields_inside_of_sampling_params_are_looked_at_too():
    body = {"text": "a", "sampling_params": {"stop_regex": "a*"}}
    assert problem_of("generate", body).param == "sampling_params.stop_regex"
    assert read("generate", {"text": "a", "sampling_params": {"skip_special_tokens": True}})


FIELDS = [
    *("prompt", "messages", "text", "input_ids", "n", "logprobs", "stop", "seed", "stream", "logit_bias"),
    *("best_of", "tools", "max_tokens", "baton", "sampling_params", "bootstrap_room", "bootstrap_host"),
    *("bootstrap_port", "stream_options", "chat_template_kwargs"),
]


def anything(chance: random.Random, depth: int = 0):
    """Some JSON value."""
    kinds = [None, True, 0, -1, 2**70, 0.5, 1e300, "", "x", "1", "\x00\u4f60"]
    kind = chance.randrange(len(kinds) + (4 if depth < 3 else 0))
    if kind < len(kinds):
        return kinds[kind]
    inner = [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return inner if kind % 2 else {chance.choice(FIELDS): each for each in inner}


def test_nothing_but_problems_comes_of_any_body():
    chance = random.Random(6)
    num_read = 0
    for _ in range(5000):
        kind = chance.choice(sorted(READERS))
        body = {chance.choice(FIELDS): anything(chance) for _ in range(chance.randrange(4))}
        problem = None
        try:
            read(kind, {**GOOD[kind], **body})
            num_read += 1
        except ApiError as found:
            problem = found
        assert problem is None or (problem.status == 400 and len(problem.message) < 500), (kind, body)
    assert 500 < num_read < 4500


def test_the_documentation_lists_the_fields_without_effect():
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("- without effect: "))
    assert set(re.findall(r"`(\w+)`", line)) == IGNORED


def test_the_documentation_lists_every_code():
    root = Path(__file__).parents[2]
    sources = "".join(path.read_text() for path in (root / "src/baton/serving").glob("*.py"))
    codes = {*re.findall(r'code="(\w+)"', sources), *STATUSES, "invalid_value", TOO_LONG}
    table = (root / "docs" / "http.md").read_text().partition("## Errors")[2].partition("## Access")[0]
    assert {code for code in codes if f"`{code}`" not in table} == set()
