"""From a request to jobs: indices, rooms, resumption, limits."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.engine.text.vocabularies import tokenizer
from tests.serving.parsed import CONTEXT, FAR, NEAR, PREFILL, asked, model, read

from baton.engine.requests import InboundHandoff, OutboundHandoff
from baton.engine.sampling_params import SamplingParams
from baton.serving.http import ApiError, Caller
from baton.serving.openai import (
    ROLES,
    ChoiceDelta,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    Usage,
    claimed_id,
    parse_request,
    reader_of,
    response_format,
)

TEXT = "the fox"
ROOM = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 8998, "bootstrap_room": 77}


def problem_of(body, kind="completions", caller=NEAR, **place) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asked(body, kind, caller, **place)
    return raised.value


def test_parameters_that_a_request_leaves_out_are_the_models():
    defaults = SamplingParams(temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    served = replace(model(), defaults=defaults)

    def params(body, kind="completions") -> SamplingParams:
        return asyncio.run(parse_request(read(kind, body), NEAR, served)).jobs[0].request.params

    def chosen(found: SamplingParams) -> tuple[float, ...]:
        return found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty

    given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert chosen(params({"prompt": TEXT})) == (0.5, 9, 0.9, 0.1, 1.2)
    assert chosen(params({"text": TEXT}, "generate")) == (0.5, 9, 0.9, 0.1, 1.2)
    assert chosen(params({"prompt": TEXT, **given})) == (0.0, 0, 1.0, 0.0, 1.0)
    assert chosen(params({"text": TEXT, "sampling_params": given}, "generate")) == (0.0, 0, 1.0, 0.0, 1.0)


def test_every_form_of_a_prompt_comes_to_the_same_ids():
    ids = tokenizer().encode(TEXT)
    assert asked({"prompt": TEXT}).jobs[0].request.tokens == tuple(ids)
    assert asked({"prompt": ids}).jobs[0].request.tokens == tuple(ids)
    assert asked({"prompt": [TEXT]}).prompts == (tuple(ids),)
    assert asked({"prompt": [ids, ids]}).prompts == (tuple(ids),) * 2
    assert asked({"text": [TEXT, "a"]}, "generate").prompts[0] == tuple(ids)
    assert asked({"input_ids": ids}, "generate").prompts == (tuple(ids),)


def test_input_embeds_are_rows_of_float32():
    rows = [[0.5, -1, 2e-3], [1, 2, 3]]
    (job,) = asked({"input_embeds": rows}, "generate").jobs
    assert (job.request.tokens, job.request.embeddings) == ((0, 0), struct.pack("6f", *rows[0], *rows[1]))
    several = asked({"input_embeds": [rows, rows[:1]]}, "generate").jobs
    assert [len(job.request.embeddings) for job in several] == [24, 12]
    for wrong in (
        [],
        [[]],
        [[1, 2]],
        [[1, 2, [3]]],
        [rows, [[1, 2]]],
        [rows, []],
        [[1, 2, 1e39]],
        [rows, [1]],
    ):
        with pytest.raises(ApiError, match="input_embeds is") as found:
            asked({"input_embeds": wrong}, "generate")
        assert (found.value.status, found.value.param) == (400, "input_embeds")
    with pytest.raises(ApiError, match="give one of text, input_ids and input_embeds"):
        asked({"input_embeds": rows, "text": TEXT}, "generate")
    with pytest.raises(ApiError, match="send it to /generate"):
        asked({"input_embeds": rows, "prompt": TEXT})


def test_parts_of_a_message_are_its_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = asked({"messages": [{"role": "user", "content": "a\nb"}]}, "chat")
    assert asked({"messages": [{"role": "user", "content": parts}]}, "chat").prompts == whole.prompts
    wrong = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert problem_of({"messages": [wrong]}, "chat").param == "messages[0].content[0].type"
    assert problem_of({"messages": [{"role": "user"}]}, "chat").param == "messages[0].content"
    assert problem_of({"messages": [{"role": "nobody", "content": "x"}]}, "chat").param == "messages"


def test_roles_are_those_of_the_api_or_of_the_template():
    for role in ROLES:
        assert asked({"messages": [{"role": role, "content": "x"}]}, "chat")
    for role in ("alien", "", "user<|im_end|>", "User"):
        problem = problem_of({"messages": [{"role": role, "content": "x"}]}, "chat")
        assert (problem.status, problem.param, problem.code) == (400, "messages[0].role", "unknown_role")
        assert "developer" in problem.message


def test_texts_and_chats_are_tokenized_as_they_are_prompted():
    def tokenized(**body: Any) -> Tokenized:
        return asyncio.run(model().tokenize(reader_of(TokenizeRequest)(msgspec.json.encode(body))))

    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    ids = tokenizer().encode(TEXT)
    assert tokenized(prompt=TEXT) == Tokenized(len(ids), CONTEXT, ids)
    assert tuple(tokenized(**chat).tokens) == asked(chat, "chat").prompts[0]
    spelled = tokenized(prompt=TEXT, return_token_strs=True).token_strs
    assert "".join(spelled).replace("\u0120", " ") == TEXT
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", **chat}, "prompt"),
        ({**chat, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "text": "b"}, "text"),
    ):
        with pytest.raises(ApiError) as raised:
            tokenized(**body)
        assert (raised.value.status, raised.value.param) == (400, param)


def test_detokenizing_shows_special_tokens():
    ids = [*tokenizer().encode(TEXT), 2]

    def detokenized(tokens: list[int]) -> str:
        return asyncio.run(model().detokenize(DetokenizeRequest(tokens=tokens))).prompt

    assert detokenized(ids) == f"{TEXT}<|im_end|>"
    assert detokenized([]) == ""
    with pytest.raises(ApiError, match="tokens is 432: give token ids from 0 to 431"):
        detokenized([432])


def test_tools_need_a_template_that_takes_them():
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
    assert problem_of(body, "chat").param == "tools"
    assert asked({**body, "tools": []}, "chat")


def test_template_options_reach_the_template_and_reserved_ones_do_not():
    body = {"messages": [{"role": "user", "content": "a"}]}
    plain = asked(body, "chat").prompts
    assert asked({**body, "chat_template_kwargs": {"speaker": "dog"}}, "chat").prompts != plain
    assert asked({**body, "add_generation_prompt": False}, "chat").prompts != plain
    for name in ("tokenize", "chat_template"):
        assert problem_of({**body, "chat_template_kwargs": {name: 1}}, "chat").param == "chat_template_kwargs"


def test_choices_are_counted_by_prompt_and_answer():
    parsed = asked({"prompt": ["a", "b"], "n": 3})
    assert parsed.choices() == [0, 1, 2, 3, 4, 5]
    assert [(job.prompt_index, job.request.params.n) for job in parsed.jobs] == [(0, 3), (1, 3)]


def test_rooms_make_the_two_legs():
    job = asked({"prompt": "a", **ROOM}).jobs[0].request
    assert job.handoff == InboundHandoff("77", "10.0.0.5:8998", is_early=True)
    assert asked({"prompt": "a", **ROOM}, **PREFILL).jobs[0].request.handoff == OutboundHandoff("77")
    late = {"address": "x:1", "first_token": "decode"}
    assert asked({"prompt": "a", **ROOM}, **late).jobs[0].request.handoff.is_early is False
    wished = {"prompt": "a", **ROOM, "baton": {"first_token": "decode"}}
    assert asked(wished).jobs[0].request.handoff.is_early is False
    both = {"role": "both", "address": "10.0.0.5:8998"}
    assert asked({"prompt": "a", **ROOM}, **both).jobs[0].request.handoff == OutboundHandoff("77")
    v6 = {**ROOM, "bootstrap_host": "::1"}
    assert asked({"prompt": "a", **v6}).jobs[0].request.handoff.source == "[::1]:8998"


def test_both_legs_draw_alike():
    legs = [asked({"prompt": "a", **ROOM}, **place).jobs[0].request for place in ({}, PREFILL)]
    assert legs[0].params.seed == legs[1].params.seed == 77
    assert asked({"prompt": "a", "seed": 5, **ROOM}).jobs[0].request.params.seed == 5
    assert (
        asked({"prompt": "a"}).jobs[0].request.params.seed
        != asked({"prompt": "a"}).jobs[0].request.params.seed
    )


def test_several_jobs_have_a_room_each():
    rooms = {"bootstrap_host": ["h"] * 2, "bootstrap_port": [1, 2], "bootstrap_room": [7, 8]}
    hands = [job.request.handoff for job in asked({"prompt": ["a", "b"], **rooms}).jobs]
    assert hands == [InboundHandoff("7", "h:1"), InboundHandoff("8", "h:2")]
    assert problem_of({"prompt": ["a", "b"], **ROOM}).param == "bootstrap_room"
    assert problem_of({"prompt": ["a", "b", "c"], **rooms}).param == "bootstrap_room"
    # A router that counts answers sends as many as there are, of which both legs take the same.
    counted = {"bootstrap_host": ["h"] * 3, "bootstrap_port": [1] * 3, "bootstrap_room": [7, 8, 9]}
    assert asked({"prompt": "a", "n": 3, **counted}).jobs[0].request.handoff.transfer == "7"
    assert problem_of({"prompt": "a", **ROOM, "bootstrap_port": None}).param == "bootstrap_port"


def test_rooms_are_for_neighbours_and_routers():
    for name, value in ROOM.items():
        problem = problem_of({"prompt": "a", name: value}, caller=FAR)
        assert (problem.status, problem.param) == (403, name)
    assert asked({"prompt": "a", **ROOM}, caller=Caller(is_router=True)).jobs[0].request.handoff
    # Who may not is not heard at all, whatever it says.
    assert asked({"prompt": "a", "baton": {"id": "mine"}}, caller=FAR).id != "mine"
    assert asked({"prompt": "a", "baton": "nonsense"}, caller=FAR)
    assert problem_of({"prompt": "a", "baton": "nonsense"}).param == "baton"


def test_a_refused_body_has_the_id_of_its_router():
    body = json.dumps({"prompt": "a", "temprature": 1, "baton": {"id": "cmpl-1"}}).encode()
    assert claimed_id(body, Caller(is_router=True)) == "cmpl-1"
    assert claimed_id(body, FAR) == ""
    for broken in (b"", b"[1]", body[:-1], b'{"baton": {"id": "two words"}}', b'{"prompt": "a"}'):
        assert claimed_id(broken, Caller(is_router=True)) == ""


def test_a_resumed_request_has_a_job_per_open_choice():
    rooms = {"bootstrap_host": ["h"] * 2, "bootstrap_port": [1] * 2, "bootstrap_room": [7, 8]}
    resume = [{"index": 3, "tokens": [9, 8]}, {"index": 0, "tokens": []}]
    private = {"id": "cmpl-x", "created": 12, "resume": resume, "done": {"1": 4, "2": 5}}
    parsed = asked({"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "baton": private, **rooms})
    first, second = (job.request for job in parsed.jobs)
    assert (first.index, first.generated, first.params.n, first.handoff.transfer) == (1, (9, 8), 1, "7")
    assert (second.index, second.generated, second.handoff.transfer) == (0, (), "8")
    assert [job.prompt_index for job in parsed.jobs] == [1, 0]
    assert first.tokens == tuple(tokenizer().encode("b"))
    assert (parsed.id, parsed.created, parsed.choices()) == ("cmpl-x", 12, [3, 0])
    wrong = {**private, "resume": [{"index": 4, "tokens": []}]}
    assert problem_of({"prompt": ["a", "b"], "n": 2, "baton": wrong}).param == "baton.resume"
    wrong = {**private, "resume": [{"index": 0, "tokens": [432]}]}
    assert problem_of({"prompt": "a", "baton": wrong}).param == "baton.resume"


def test_lengths_are_held_against_the_context():
    ids = [5] * (CONTEXT - 4)
    assert asked({"prompt": ids, "max_tokens": 4}).jobs[0].request.params.max_tokens == 4
    for body in ({"prompt": ids, "max_tokens": 5}, {"prompt": [5] * CONTEXT}, {"prompt": ""}):
        problem = problem_of(body)
        assert (problem.status, problem.code) == (400, "context_length_exceeded")
    assert problem_of({"prompt": "x" * 300 * CONTEXT}).code == "context_length_exceeded"
    chat = asked({"messages": [{"role": "user", "content": "a"}]}, "chat")
    assert chat.jobs[0].request.params.max_tokens == CONTEXT - len(chat.prompts[0])
    # Nobody asked for the default.
    assert asked({"prompt": ids}).jobs[0].request.params.max_tokens == 4
    assert asked({"text": "a"}, "generate").jobs[0].request.params.max_tokens == CONTEXT - 1
    assert asked({"prompt": "a"}).jobs[0].request.params.max_tokens == 16
    # A source only prefills: what is asked for beyond that is for the target to judge.
    assert asked({"prompt": ids, "max_tokens": 5, **ROOM}, **PREFILL)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [432]}, "prompt"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"432": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 200, "n": 2}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
def test_wrong_values_name_their_field(body, param: str):
    problem = problem_of(body)
    assert (problem.status, problem.param) == (400, param)


def test_names_of_models():
    assert asked({"prompt": "a", "model": "tiny"})
    problem = problem_of({"prompt": "a", "model": "gpt-4"})
    assert (problem.status, problem.code) == (404, "model_not_found")
    assert "'tiny'" in problem.message
    assert problem_of({"prompt": "a", "model": "tiny:my-lora"}).status == 400
    # A stock PD router sends one name to two sides that may have two.
    assert asked({"prompt": "a", "model": "peers-name", "bootstrap_room": 7}, **PREFILL)
    assert problem_of({"prompt": "a", "model": "tiny:my-lora", "bootstrap_room": 7}).status == 400
    path = {"role": "both", "name": "/models/tiny"}
    assert asked({"prompt": "a", "model": "tiny"}, **path)
    assert asked({"prompt": "a", "model": "/models/tiny"}, **path)


def test_without_a_tokenizer_prompts_are_ids():
    async def ask(body):
        return await parse_request(read("completions", body), NEAR, model(has_tokenizer=False))

    assert asyncio.run(ask({"prompt": [1, 2]})).prompts == ((1, 2),)
    for body, param in (({"prompt": "a"}, "prompt"), ({"prompt": [1], "stop": "x"}, "stop")):
        with pytest.raises(ApiError) as raised:
            asyncio.run(ask(body))
        assert raised.value.param == param


def echoes(body: dict[str, Any]) -> list[str]:
    """The texts of choices of which nothing was generated yet."""
    parsed = asked(body)
    deltas = [ChoiceDelta(index, True) for index in parsed.choices()]
    return [choice.text for choice in response_format(parsed, model()).whole(deltas, Usage(0, 0, 0)).choices]


def test_echo_goes_ahead():
    ids = tokenizer().encode(TEXT)
    assert echoes({"prompt": [TEXT, "a"], "echo": True}) == [TEXT, "a"]
    assert echoes({"prompt": ids, "echo": True}) == [TEXT]
    assert echoes({"prompt": [ids], "echo": True}) == [TEXT]
    assert echoes({"prompt": TEXT}) == [""]


def test_a_dp_rank_is_that_of_the_side_which_reads_it():
    decode, prefill = ({**place, "num_dp_groups": 3} for place in ({}, PREFILL))
    ranks = {"data_parallel_rank": 2, "disagg_prefill_dp_rank": 1}
    job = asked({"prompt": "a", **ROOM, **ranks}, **decode).jobs[0].request
    assert (job.dp, job.handoff.source_dp) == (2, 1)
    assert asked({"prompt": "a", **ROOM, **ranks}, **prefill).jobs[0].request.dp == 1
    # sglang-router names the rank of each side for itself, under the newer name.
    assert asked({"prompt": "a", **ROOM, "routed_dp_rank": 2}, **prefill).jobs[0].request.dp == 2
    plain = asked({"text": "a"}, "generate", **decode).jobs[0].request
    assert plain.dp is None
    assert asked({"text": "a", "data_parallel_rank": 0}, "generate", **decode).jobs[0].request.dp == 0
    resumed = {"prompt": "a", "data_parallel_rank": 1, "baton": {"resume": [{"index": 0, "tokens": [5]}]}}
    assert asked(resumed, **decode).jobs[0].request.dp == 1
    for body, place, param in (
        ({"data_parallel_rank": 3}, decode, "data_parallel_rank"),
        ({"routed_dp_rank": 3}, decode, "routed_dp_rank"),
        ({"disagg_prefill_dp_rank": 3}, prefill, "disagg_prefill_dp_rank"),
    ):
        problem = problem_of({"prompt": "a", **body}, **place)
        assert (problem.status, problem.param) == (400, param)
        assert problem.message == f"{param} is 3: give a DP group from 0 to 2"
