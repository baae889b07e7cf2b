"""A target tells first tokens while the cache is still on its way, and stands by them or says why not."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import (
    BothSides,
    Heard,
    InstancePool,
    Listener,
    Side,
    ask_one,
    check_idle,
    end_of,
    greedy,
    until,
)
from tests.engine.e2e.prompts import prompt
from tests.engine.tiny import oracle

from baton.engine.deployment import Pair
from baton.engine.instance import Instance
from baton.engine.requests import (
    EngineRequest,
    InboundHandoff,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestFinished,
)
from baton.engine.sampling_params import SamplingParams
from baton.protocol.outcomes import Why

pytestmark = pytest.mark.engine

LENGTH = 500
SLOW_BYTES_PER_S = 2e5
"""The prompt's cache takes seconds."""
STUCK_BYTES_PER_S = 2e3
"""It takes minutes."""
SAMPLED = SamplingParams(temperature=2.0, seed=3, max_tokens=6, ignore_eos=True, n=3)


@pytest.fixture(scope="module")
def slow(pool: InstancePool, folder: Path) -> Pair:
    first = Side(str(folder), name="slow").but(link_bytes_per_s=SLOW_BYTES_PER_S, chunk_tokens=LENGTH)
    return pool.pair(first, Side(str(folder), name="target"))


@pytest.fixture(scope="module")
def stuck(pool: InstancePool, slow: Pair, folder: Path) -> Pair:
    first = Side(str(folder), name="stuck").but(link_bytes_per_s=STUCK_BYTES_PER_S, chunk_tokens=LENGTH)
    return Pair(pool.instance(first), slow.decode)


def settled_s(listener: Listener) -> float:
    record = listener.instance.core.requests.get(listener.number)
    return record.trace.settled_s if record else -1.0


def firsts(listener: Listener, count: int) -> Heard:
    """The first tokens of so many answers, heard before the cache was there."""
    heard = Heard()
    while len(heard.answers) < count:
        event = listener.next()
        assert isinstance(event, OutputChunk), event
        heard.add(event)
    assert settled_s(listener) == 0.0, "the cache was there before the first tokens"
    return heard


def test_all_first_tokens_come_early_and_once(slow: Pair) -> None:
    request = EngineRequest(tuple(prompt(LENGTH)), SAMPLED)
    alone = ask_one(slow.decode, replace(request, salt="alone"))
    handed = BothSides(slow, request)
    heard = firsts(handed.decode, SAMPLED.n)
    rest = handed.decode.heard()
    for index, answer in rest.answers.items():
        heard.answers[index] += answer
    assert heard.tokens == alone.tokens
    assert rest.finishes == alone.finishes
    story = rest.traces["both"]
    assert story.token_s < story.settled_s < story.stepped_s
    assert isinstance(handed.prefill.until(RequestFinished), RequestFinished)
    check_idle(slow.prefill, slow.decode)


def test_not_early_where_that_is_not_wanted(slow: Pair, folder: Path) -> None:
    asked = prompt(LENGTH, "late")
    heard = ask_one(slow, greedy(asked, 4), first_token="decode")
    assert heard.tokens == [oracle(folder, [asked], 4)[0]]
    assert heard.traces["decode"].token_s >= heard.traces["decode"].settled_s > 0
    early = ask_one(slow, greedy(asked, 4, salt="early"))
    assert early.tokens == heard.tokens
    assert early.traces["decode"].token_s < early.traces["decode"].settled_s


def test_a_handoff_that_fails_after_its_first_token(stuck: Pair) -> None:
    handed = BothSides(stuck, greedy(prompt(LENGTH), 8))
    firsts(handed.decode, 1)
    stuck.prefill.core.abort(handed.prefill.number, "the source had enough")
    trouble = handed.decode.until(RequestError)
    assert isinstance(trouble, RequestError)
    assert trouble.cause is not None
    assert trouble.cause.why is Why.ABORTED
    assert "the source had enough" in trouble.text
    assert isinstance(handed.decode.until(RequestFinished), RequestFinished)
    check_idle(stuck.prefill, stuck.decode)


def test_an_abort_between_the_first_token_and_the_cache(stuck: Pair) -> None:
    handed = BothSides(stuck, EngineRequest(tuple(prompt(LENGTH)), SAMPLED))
    firsts(handed.decode, SAMPLED.n)
    until(lambda: stuck.decode.load().pages.leased > 0, "the target's pages are leased")
    stuck.decode.core.abort(handed.decode.number)
    heard = handed.decode.heard()
    assert heard.finishes == dict.fromkeys(range(SAMPLED.n), "abort")
    assert not any(heard.answers.values())
    trouble = handed.prefill.until(RequestError)
    assert isinstance(trouble, RequestError)
    assert trouble.cause is not None
    check_idle(stuck.prefill, stuck.decode)
    for instance in (stuck.prefill, stuck.decode):
        until(lambda one=instance: is_free(one), f"all pages are free: {instance.load()}")


def is_free(instance: Instance) -> bool:
    load = instance.load()
    return load.pages.free == load.pages.total and load.num_tokens == load.num_running == 0


def test_an_answer_that_ended_at_its_source(stuck: Pair, folder: Path) -> None:
    """One token is all, by the request or by the source's context; nothing waits for the cache."""
    asked = prompt(LENGTH)
    wanted = [oracle(folder, [asked], 4)[0][:1]]
    heard = BothSides(stuck, greedy(asked, 1, n=2)).decode.heard()
    assert (heard.tokens, heard.finishes) == (wanted * 2, {0: "length", 1: "length"})
    check_idle(stuck.prefill, stuck.decode)


def test_a_source_with_less_context(pool: InstancePool, slow: Pair, folder: Path) -> None:
    first = Side(str(folder), name="short").but(context_max=41)
    pair = Pair(pool.instance(first), slow.decode)
    asked = prompt(40)
    heard = BothSides(pair, greedy(asked, 8)).decode.heard()
    assert heard.tokens == [oracle(folder, [asked], 4)[0][:1]]
    assert heard.finishes == {0: "length"}
    check_idle(pair.prefill, pair.decode)


def test_another_number_of_answers_at_the_source(slow: Pair) -> None:
    transfer, request = secrets.token_hex(8), greedy(prompt(20), 8)
    inbound = InboundHandoff(transfer, slow.prefill.address)
    two = SamplingParams(max_tokens=8, n=2, ignore_eos=True, temperature=0.0)
    decode = Listener(slow.decode, replace(request, params=two, handoff=inbound))
    prefill = Listener(slow.prefill, replace(request, handoff=OutboundHandoff(transfer)))
    tokens, end = end_of(decode)
    assert tokens == []
    assert isinstance(end, RequestError)
    assert end.cause is not None
    assert end.cause.why is Why.REFUSED_PROMPT
    end_of(prefill)
    check_idle(slow.prefill, slow.decode)
