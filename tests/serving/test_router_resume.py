"""A stream that breaks off goes on elsewhere: no gap, no token twice, no second beginning."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from tests.serving.peers import NUM_TOKENS, Fault, expected, token
from tests.serving.router_world import Streamed, read_stream, run, until, world

from baton.serving.http import ResumedChoice, TokenNote
from baton.serving.router import RouterLimits
from baton.serving.wire import StreamFilter, StreamProgress

CHAT = "/v1/chat/completions"
ENDS = {
    "cut": Fault(is_cut=True),
    "torn": Fault(is_cut=True, is_torn=True),
    "error event": Fault(error_code="PEER_LOST"),
}


def check(found: Streamed, texts: dict[int, str]) -> None:
    assert found.texts == texts
    assert found.errors == []
    assert found.num_done == 1
    assert len(found.ids) == 1
    assert set(found.finishes) == set(texts)


def check_chat(found: Streamed, texts: dict[int, str]) -> None:
    check(found, texts)
    assert found.roles == dict.fromkeys(texts, 1)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("after", [1, 2, NUM_TOKENS - 1, NUM_TOKENS])
def test_completion_goes_on_after_any_event(end: str, after: int):
    async def body() -> None:
        async with world(2, 2) as w:
            w.d0.faults = [Fault(**{**vars(ENDS[end]), "after": after})]
            check(await w.stream({"prompt": "the fox"}), {0: expected("the fox")})

    run(body)


def test_the_log_says_who_failed_and_that_the_stream_goes_on(caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        async with world(2, 2) as w:
            w.d0.faults = [Fault(error_code="PEER_LOST", after=2)]
            check(await w.stream({"prompt": "the fox"}), {0: expected("the fox")})

    with caplog.at_level(logging.INFO, logger="baton.serving"):
        run(body)
    (record,) = (record for record in caplog.records if getattr(record, "fields", {}).get("event") == "retry")
    assert (record.levelname, record.fields["num_tokens"]) == ("WARNING", 2)
    assert "PEER_LOST" in record.getMessage()
    assert record.getMessage().endswith("the stream is resumed")
    assert any("is unhealthy" in text for text in caplog.messages), "the instance that was blamed"


@pytest.mark.parametrize("after", range(2 * NUM_TOKENS + 2))
def test_chat_of_two_answers_has_one_role_each(after: int):
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(is_cut=True, after=after)]
            ask = {"messages": [{"role": "user", "content": "hello"}], "n": 2}
            found = await w.stream(ask, CHAT)
            check_chat(found, {0: expected("hello", 0), 1: expected("hello", 1)})

    run(body)


def test_batch_with_several_answers_goes_on_twice_and_counts_its_tokens():
    async def body() -> None:
        async with world(2, 2) as w:
            w.d0.faults = [Fault(is_cut=True, after=9)]
            w.d1.faults = [Fault(error_code="COPY_FAILED", after=13)]
            ask = {"prompt": ["a", "b"], "n": 2, "stream_options": {"include_usage": True}}
            found = await w.stream(ask)
            texts = {place * 2 + k: expected(prompt, k) for place, prompt in enumerate("ab") for k in (0, 1)}
            check(found, texts)
            assert [usage["completion_tokens"] for usage in found.usage] == [4 * NUM_TOKENS]
            last = w.d0.seen[-1].body
            assert len(last["bootstrap_room"]) == len(last["baton"]["resume"])
            assert await w.metric("baton_router_resumes_total") == 2

    run(body)


def test_finished_choices_are_not_asked_for_again():
    async def body() -> None:
        async with world(1, 2) as w:
            after = 2 * NUM_TOKENS - 1  # the first choice is through, the second misses a token
            w.d0.faults = [Fault(is_cut=True, after=after)]
            found = await w.stream({"prompt": "x", "n": 2, "stream_options": {"include_usage": True}})
            check(found, {0: expected("x", 0), 1: expected("x", 1)})
            private = w.d1.seen[0].body["baton"]
            assert [each["index"] for each in private["resume"]] == [1]
            assert private["done"] == {"0": NUM_TOKENS}

    run(body)


def test_prefill_lost_between_first_token_and_handoff_goes_on():
    async def body() -> None:
        async with world(2, 2) as w:
            w.p0.faults = [Fault(is_hung=True)]
            w.d0.faults = [Fault(is_hung=True, after=1)]
            w.rooms.event = lambda room: _set()  # the first token comes before the cache
            asking = asyncio.create_task(w.stream({"prompt": "x"}))
            await until(lambda: w.d0.num_sent)
            await w.p0.stop()
            check(await asking, {0: expected("x")})

    run(body)


def test_prefill_lost_after_the_handoff_is_nobodys_business():
    async def body() -> None:
        async with world(2, 2) as w:
            w.p0.faults = [Fault(is_hung=True)]
            w.rooms.event = lambda room: _set()
            w.d0.pace_s = 0.05
            asking = asyncio.create_task(w.stream({"prompt": "x"}))
            await until(lambda: w.d0.num_sent >= 3)
            await w.p0.stop()
            check(await asking, {0: expected("x")})
            assert await w.metric("baton_router_resumes_total") == 0

    run(body)


def test_stream_that_cannot_go_on_ends_with_the_cause():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_attempts_max=2)) as w:
            w.d0.faults = [Fault(is_cut=True, after=3), *[Fault(503, "OUT_OF_PAGES")] * 5]
            found = await w.stream({"prompt": "x"})
            assert found.texts == {0: expected("x", 0, 3)}
            assert [error["code"] for error in found.errors] == ["OUT_OF_PAGES"]
            assert found.num_done == 0
            assert await w.metric('baton_router_given_up_total{cause="OUT_OF_PAGES"}') == 1

    run(body)


def test_stream_waits_for_room_rather_than_break_off():
    async def body() -> None:
        async with world(1, 1) as w:
            full = Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"})
            w.d0.faults = [Fault(is_cut=True, after=3), full, full]
            check(await w.stream({"prompt": "x"}), {0: expected("x")})

    run(body)


def test_engine_error_in_a_stream_is_told_and_not_tried_again():
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(error_code="ENGINE", after=2)]
            found = await w.stream({"prompt": "x"})
            assert [error["code"] for error in found.errors] == ["ENGINE"]
            assert w.d1.seen == []

    run(body)


@pytest.mark.long
@pytest.mark.parametrize(
    "broken",
    ["gap", "twice", "role"],
)
def test_checks_of_these_tests_see_broken_streams(broken: str):
    pieces = [{"role": "assistant"}, {"content": "<1>"}, {"content": "<2>"}, {"content": "<3>"}]
    if broken == "gap":
        del pieces[2]
    else:
        pieces.insert(2, pieces[1] if broken == "twice" else pieces[0])
    events = [{"id": "a", "choices": [{"index": 0, "delta": each}]} for each in pieces]
    events[-1]["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    raw = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    found = read_stream(raw + b"data: [DONE]\n\n")
    with pytest.raises(AssertionError):
        check_chat(found, {0: "<1><2><3>"})


def no_hold(stream_filter: StreamFilter, note: TokenNote, raw: bytes) -> bytes:
    stream_filter._record(note)
    return raw


def one_less(progress: StreamProgress) -> tuple[ResumedChoice, ...]:
    return tuple(ResumedChoice(index, tuple(tokens[:-1])) for index, tokens in progress._tokens.items())


def one_more(progress: StreamProgress) -> tuple[ResumedChoice, ...]:
    """As if an event that was torn had been taken for whole."""
    tokens = progress._tokens[0]
    return (ResumedChoice(0, (*tokens, token("hello", 0, len(tokens)))),)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "broken", "after"),
    [
        (StreamFilter, "_forward", no_hold, 1),
        (StreamProgress, "resume", property(one_less), 4),
        (StreamProgress, "resume", property(one_more), 4),
    ],
)
def test_broken_routers_are_caught(kind: type, name: str, broken: object, after: int, monkeypatch):
    async def body() -> None:
        async with world(1, 2, RouterLimits(num_attempts_max=2)) as w:
            w.d0.faults = [Fault(is_cut=True, after=after)]
            ask = {"messages": [{"role": "user", "content": "hello"}]}
            monkeypatch.setattr(kind, name, broken)
            found = await w.stream(ask, CHAT)
            with pytest.raises(AssertionError):
                check_chat(found, {0: expected("hello")})

    run(body)


def test_client_refuses_notes_and_torn_events():
    for raw in (b': baton {"index":0}\ndata: [DONE]\n\n', b'data: {"id": 1'):
        with pytest.raises(AssertionError):
            read_stream(raw)
    assert TokenNote(0).tokens == ()


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
