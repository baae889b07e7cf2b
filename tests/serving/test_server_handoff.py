"""Two servers, each one side of a hand-over, asked as a router asks them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.ports import free_port
from tests.serve.parts import Answer
from tests.serve.speaking import encode, model, oracle_text
from tests.serving.live import Live, live, until
from tests.serving.streams import half_read, heard

from baton.serving.http import EventSplitter

pytestmark = pytest.mark.serve

SECRET = b"a secret of both the servers"
FOX = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Live, Live]]:
    sides = {"secret": SECRET, "is_warmed": False}
    with (
        live(role="prefill", name="source", layout="pp2", **sides) as prefill,
        live(role="decode", name="target", **sides) as decode,
    ):
        yield prefill, decode


def ask_both(pair: tuple[Live, Live], path: str, body: dict[str, Any], num_jobs: int = 1) -> list[Answer]:
    """The answers of prefill and decode."""
    host, _, port = pair[0].instance.address.rpartition(":")
    rooms = [secrets.randbits(63) for _ in range(num_jobs)]
    several = {
        "bootstrap_host": [host] * num_jobs,
        "bootstrap_port": [int(port)] * num_jobs,
        "bootstrap_room": rooms,
    }
    one = {name: values[0] for name, values in several.items()}
    whole = {**body, **(several if num_jobs > 1 else one)}
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda side: side.ask(path, whole), pair))


def test_the_answer_is_the_oracles_and_both_sides_tell_of_it(pair: tuple[Live, Live]):
    prefill, decode = pair
    body = {
        "prompt": FOX,
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "baton": {"id": "cmpl-both"},
    }
    first, answer = ask_both(pair, "/v1/completions", body)
    assert (first.status, answer.status) == (200, 200), (first.text, answer.text)
    expected = oracle_text(FOX, 9, ignore_eos=True)
    assert answer.json["choices"][0]["text"] == expected.text
    assert answer.json["usage"]["completion_tokens"] == 9
    assert first.json["choices"][0]["finish_reason"] == "handed"
    assert first.json["usage"]["completion_tokens"] == 1
    until(lambda: prefill.is_idle() and decode.is_idle(), "all pages are back on both sides")
    for side, what in ((prefill, "source"), (decode, "target")):
        told = side.ask("/v1/timelines/cmpl-both").json
        assert (told["instance"], told["jobs"][0]["side"]) == (what, what)
    source = prefill.ask("/v1/timelines/cmpl-both").json["jobs"][0]
    assert {"queue_s", "compute_s", "exposed_s", "admission_s"} <= set(source["figures"])
    trace = prefill.ask("/v1/timelines/cmpl-both?format=perfetto").json["traceEvents"]
    assert {"prefill", "exposed transfer", "0 to 0", "1 to 0"} <= {event["name"] for event in trace}
    assert prefill.metric('baton_route_bytes_total{source_rank="0",target_rank="0"}') > 0
    assert prefill.metric('baton_handoff_seconds_count{stage="exposed"}') > 0
    assert decode.metric("baton_tth_seconds_count") > 0


def test_streams_of_several_prompts_and_answers(pair: tuple[Live, Live]):
    prompts = [FOX, "hello"]
    body = {
        **{"prompt": prompts, "n": 2, "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True},
        **{"stream_options": {"include_usage": True}, "baton": {"tokens": True}},
    }
    first, answer = ask_both(pair, "/v1/completions", body, 2)
    assert (first.status, answer.status) == (200, 200), (first.text, answer.text)
    stream = heard(list(EventSplitter().feed(answer.body)))
    assert stream.is_done
    for index in range(4):
        expected = oracle_text(prompts[index // 2], 6, ignore_eos=True)
        assert stream.choices[index].text == expected.text
        assert stream.choices[index].tokens == list(expected.tokens)
    assert stream.usage["completion_tokens"] == 24


def test_one_token_and_chats_and_generate(pair: tuple[Live, Live]):
    wishes = {"max_tokens": 1, "temperature": 0}
    first, answer = ask_both(pair, "/v1/completions", {"prompt": FOX, **wishes})
    assert first.json["choices"][0]["finish_reason"] == answer.json["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    answer = ask_both(pair, "/v1/chat/completions", chat)[1]
    assert answer.json["choices"][0] == pair[1].ask("/v1/chat/completions", chat).json["choices"][0]
    params = {"text": FOX, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    assert ask_both(pair, "/generate", params)[1].json["text"] == oracle_text(FOX, 5).text


def test_input_embeds_are_prefilled_in_place_of_token_ids(pair: tuple[Live, Live]):
    """The rows of a prompt's own tokens have the answer of the prompt; others have another one."""
    table = load_file(model() / "model.safetensors")["model.embed_tokens.weight"].float()
    rows = table[encode(FOX)].tolist()
    params = {"sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    for _ in range(2):  # the second one finds no prefix of the first
        answer = ask_both(pair, "/generate", {"input_embeds": rows, **params})[1]
        assert answer.json["text"] == oracle_text(FOX, 8).text
        assert answer.json["meta_info"]["prompt_tokens"] == len(rows)
        assert answer.json["meta_info"]["cached_tokens"] == 0
    several = pair[1].ask("/generate", {"input_embeds": [rows, rows[::-1]], **params}).json
    assert several[0]["text"] == oracle_text(FOX, 8).text != several[1]["text"]
    answer = pair[1].ask("/generate", {"input_embeds": [rows[0][:-1]], **params})
    assert answer.status == 400
    assert f"give a row of {len(rows[0])} numbers" in answer.json["error"]["message"]


def test_a_source_that_is_not_there_is_a_bad_gateway(pair: tuple[Live, Live]):
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": free_port(),
        "bootstrap_room": secrets.randbits(63),
    }
    for is_stream in (False, True):
        answer = pair[1].ask("/v1/completions", {"prompt": FOX, "stream": is_stream, **room})
        assert (answer.status, answer.json["error"]["code"]) == (502, "PEER_LOST"), answer.text
    assert pair[1].metric('baton_failures_total{cause="PEER_LOST"}') == 2
    until(pair[1].is_idle, "its pages are back")


def test_unequal_prompts_are_refused_on_both_sides(pair: tuple[Live, Live]):
    host, _, port = pair[0].instance.address.rpartition(":")
    room = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": secrets.randbits(63)}
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(
                lambda leg: leg[0].ask("/v1/completions", {"prompt": leg[1], "max_tokens": 4, **room}),
                ((pair[0], FOX), (pair[1], FOX + "!")),
            )
        )
    for answer in answers:
        assert (answer.status, answer.json["error"]["code"]) == (502, "REFUSED_PROMPT"), answer.text
    until(lambda: pair[0].is_idle() and pair[1].is_idle(), "all pages are back")


def test_both_legs_that_are_left_return_their_pages(pair: tuple[Live, Live]):
    """Each leg alone: the other one never comes, and the client goes."""
    host, _, port = pair[0].instance.address.rpartition(":")
    for side in pair:
        room = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": secrets.randbits(63)}
        with half_read(side, "/v1/completions", {"prompt": FOX, "max_tokens": 50, **room}):
            until(lambda side=side: side.server.open, "it was taken in")
        until(side.is_idle, f"the pages of {side.server.config.instance.name} are back")


def test_dp_ranks_choose_the_groups_of_both_sides():
    sides = {"secret": SECRET, "is_warmed": False, "layout": "dp2"}
    with (
        live(role="prefill", name="source", **sides) as prefill,
        live(role="decode", name="target", **sides) as decode,
    ):
        for source_dp, target_dp in ((1, 0), (0, 1), (1, 1)):
            ranks = {"disagg_prefill_dp_rank": source_dp, "data_parallel_rank": target_dp}
            line = f'baton_route_bytes_total{{source_rank="{source_dp}",target_rank="{target_dp}"}}'
            assert prefill.metric(line) == 0
            body = {"prompt": FOX, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **ranks}
            answers = ask_both((prefill, decode), "/v1/completions", body)
            assert [answer.status for answer in answers] == [200, 200], [each.text for each in answers]
            assert answers[1].json["choices"][0]["text"] == oracle_text(FOX, 5, ignore_eos=True).text
            assert prefill.metric(line) > 0
        assert prefill.metric('baton_route_bytes_total{source_rank="0",target_rank="0"}') == 0
        answer = decode.ask("/v1/completions", {"prompt": FOX, "data_parallel_rank": 2})
        assert (answer.status, answer.json["error"]["param"]) == (400, "data_parallel_rank")
        # Only prefill knows its own groups; it is named with the range.
        answer = ask_both((prefill, decode), "/v1/completions", {"prompt": FOX, "disagg_prefill_dp_rank": 2})
        assert (
            answer[0].json["error"]["message"] == "disagg_prefill_dp_rank is 2: give a DP group from 0 to 1"
        )
        assert (answer[1].status, answer[1].json["error"]["code"]) == (502, "REFUSED_LAYOUT")
        assert "groups are 0 to 1" in answer[1].json["error"]["message"]
