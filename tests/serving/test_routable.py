"""What is read of a body, and what is spliced into it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.serving.http import ApiError
from baton.serving.wire import GENERATE_PATH, read_routable

PATH = "/v1/completions"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=10), VALUES, max_size=5), st.sampled_from(["", " ", "\n\t "]))
def test_spliced_body_is_the_body_and_the_fields(fields: dict[str, Any], space: str):
    raw = (space + json.dumps(fields, ensure_ascii=False) + space).encode("utf-8", "surrogatepass")
    try:
        asked = read_routable(PATH, raw)
    except ApiError:
        assert any(name in fields for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port")) or (
            b"\xed" in raw  # a lone surrogate is no UTF-8
        )
        return
    fields.pop("baton", None)
    assert json.loads(asked.body_with(b'"bootstrap_room":5,"baton":{"id":"a"}')) == {
        **fields, "bootstrap_room": 5, "baton": {"id": "a"},
    }  # fmt: skip


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b'{"a":1', b'{"a":1}x', b"\xff", b'{"prompt": tru}'])
def test_what_is_no_object_is_refused(raw: bytes):
    with pytest.raises(ApiError) as refused:
        read_routable(PATH, raw)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "name", ["bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap\\u005froom"]
)
def test_rooms_of_clients_are_refused(name: str):
    with pytest.raises(ApiError) as refused:
        read_routable(PATH, b'{"prompt":"x","%s":1}' % name.encode())
    assert (refused.value.status, refused.value.code) == (403, "room_not_allowed")


@pytest.mark.parametrize("name", ["baton", "b\\u0061ton"])
def test_private_fields_of_clients_are_dropped(name: str):
    asked = read_routable(PATH, b'{"prompt":"x","%s":{"resume":[]},"baton":1,"y":2}' % name.encode())
    assert json.loads(asked.body_with(b'"z":3')) == {"prompt": "x", "y": 2, "z": 3}


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "is_list", "num_ids"),
    [
        ("hello, you", 1, False, 0),
        (["a", "b"], 2, True, 0),
        (["a"], 1, True, 0),
        ([5, 6, 7], 1, False, 3),
        ([[5, 6], [7]], 2, True, 3),
        ([], 1, False, 1),
        (None, 1, False, 0),
        (17, 1, False, 0),
    ],
)
def test_prompts_are_counted(prompt: Any, num_prompts: int, is_list: bool, num_ids: int):
    asked = read_routable(PATH, json.dumps({"prompt": prompt, "n": 3}).encode())
    assert (asked.num_prompts, asked.is_list, asked.num_choices) == (num_prompts, is_list, 3 * num_prompts)
    assert not num_ids or asked.prompt.num_tokens(1.0) == num_ids
    assert asked.prompt.is_ids == bool(num_ids)


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "is_list", "num_tokens"),
    [
        ({"text": "hello, you"}, 1, False, None),
        ({"text": ["a", "b"]}, 2, True, None),
        ({"text": None, "input_ids": [5, 6, 7]}, 1, False, 3),
        ({"input_ids": [[5, 6], [7]]}, 2, True, 3),
        ({"input_embeds": [[0.5, 1.0], [2, 3], [4, 5]]}, 1, False, 3),
        ({"input_embeds": [[[0.5], [1]], [ [2] ]]}, 2, True, 3),
        ({"input_embeds": [[0.5], 1]}, 1, False, 1),
        ({"input_embeds": "x"}, 1, False, 1),
        ({}, 1, False, None),
    ],
)  # fmt: skip
def test_prompts_of_generate_are_counted(
    prompt: dict[str, Any], num_prompts: int, is_list: bool, num_tokens: int | None
):
    params = {"n": 3, "max_new_tokens": 9}
    asked = read_routable(GENERATE_PATH, json.dumps({**prompt, "sampling_params": params}).encode())
    assert (asked.num_prompts, asked.is_list, asked.num_choices) == (num_prompts, is_list, 3 * num_prompts)
    assert asked.num_tokens_max == 9
    assert num_tokens is None or asked.prompt.num_tokens(1.0) == num_tokens
    assert asked.prompt.is_ids == (num_tokens is not None)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text": "x"}, ""),
        ({"text": "x", "return_logprob": False}, ""),
        ({"text": "x", "return_logprob": True}, "log-probabilities of all tokens"),
        ({"input_embeds": [[0.5]]}, "input embeddings"),
    ],
)
def test_streams_of_generate_that_cannot_be_resumed(fields: dict[str, Any], problem: str):
    asked = read_routable(GENERATE_PATH, json.dumps({**fields, "stream": True}).encode())
    assert asked.is_stream
    assert problem in asked.resume_problem
    assert bool(problem) == bool(asked.resume_problem)


def test_counts_of_generate_are_bounded():
    for fields in ({"text": ["x"] * 5000}, {"input_ids": [[1]] * 5000}, {"input_embeds": [[[1]]] * 5000}):
        with pytest.raises(ApiError, match="5000 prompts") as refused:
            read_routable(GENERATE_PATH, json.dumps(fields).encode())
        assert refused.value.param == next(iter(fields))
    for params in ({"n": 1_000_000_000}, {"n": "x"}, [], 5):
        raw = json.dumps({"text": "x", "sampling_params": params}).encode()
        assert read_routable(GENERATE_PATH, raw).num_choices == 1


def test_next_turn_of_a_dialogue_begins_with_the_last():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = read_routable("/v1/chat/completions", json.dumps({"messages": turns[:1]}).encode())
    after = read_routable("/v1/chat/completions", json.dumps({"messages": turns}).encode())
    assert after.prompt.raw.startswith(before.prompt.raw)


def test_counts_are_bounded_whatever_a_client_says():
    assert read_routable(PATH, b'{"prompt":"x","n":1000000000}').num_choices == 1
    assert read_routable(PATH, b'{"prompt":"x","n":64}').num_choices == 64
    with pytest.raises(ApiError, match="5000 prompts"):
        read_routable(PATH, json.dumps({"prompt": ["x"] * 5000}).encode())
    with pytest.raises(ApiError):
        read_routable(PATH, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_strange_values_are_left_to_the_instance():
    raw = b'{"model":5,"n":"x","stream":"yes","max_tokens":-1,"stream_options":[],"prompt":{"a":1}}'
    asked = read_routable(PATH, raw)
    assert (asked.model, asked.num_choices, asked.is_stream, asked.num_tokens_max) == (None, 1, False, None)
    assert json.loads(asked.body_with(b'"z":3'))["n"] == "x"
