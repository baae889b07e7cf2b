"""Requests that are given up at any moment, and more of them than there are pages for."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import (
    BothSides,
    InstancePool,
    Listener,
    Side,
    ask_all,
    check_idle,
    end_of,
    ends_of,
    greedy,
)
from tests.engine.e2e.prompts import NUM_TOKENS, PAGE, check_tokens, prompt
from tests.engine.tiny import oracle

from baton.engine.deployment import Pair
from baton.engine.requests import EngineRequest, OutputChunk, RequestFinished
from baton.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.engine

SMALL_POOL = 24 * PAGE
NUM_ASKED = 12
LENGTHS = (5, PAGE, 40, 70)


@pytest.fixture(scope="module")
def pair(pool: InstancePool, folder: Path) -> Pair:
    plain = Side(str(folder)).but(chunk_tokens=40)
    return pool.pair(replace(plain, layout="pp2"), replace(plain, layout="dp2.tp1"))


@pytest.fixture(scope="module")
def tight(pool: InstancePool, folder: Path) -> Pair:
    plain = Side(str(folder)).but(chunk_tokens=40, pool_tokens=SMALL_POOL, growth_tokens=0)
    return pool.pair(replace(plain, name="first"), replace(plain, name="second"))


def prompts(seed: str) -> list[list[int]]:
    return [prompt(LENGTHS[index % len(LENGTHS)], f"{seed} {index}") for index in range(NUM_ASKED)]


@pytest.mark.parametrize("seed", range(6))
def test_abort_of_handoffs_at_random_moments(pair: Pair, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    asked = prompts("abort")
    handed = [BothSides(pair, greedy(each, NUM_TOKENS, salt=f"abort {seed}")) for each in asked]
    doomed = chance.sample(range(NUM_ASKED), NUM_ASKED // 2)
    for index in doomed:
        time.sleep(chance.random() * 0.05)  # a moment that nobody chose
        both = handed[index].sides
        for listener in chance.choice([both, both[:1], both[1:]]):
            listener.instance.core.abort(listener.number)
    wanted = oracle(folder, asked, NUM_TOKENS)
    for index, (each, answer) in enumerate(zip(handed, wanted, strict=True)):
        ends = [end_of(listener) for listener in each.sides]
        tokens = ends[1][0]
        assert tokens == answer[: len(tokens)]
        if index not in doomed:
            assert all(isinstance(end, RequestFinished) for _, end in ends)
            assert tokens == answer
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("seed", range(3))
def test_abort_on_one_instance(pair: Pair, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    asked = prompts("abort one")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
    where = chance.choice([pair.prefill, pair.decode])
    requests = [replace(greedy(each, 1, salt=f"one {seed}"), params=params) for each in asked]
    listeners = [Listener(where, each) for each in requests]
    for listener in chance.sample(listeners, NUM_ASKED // 2):
        time.sleep(chance.random() * 0.05)  # a moment that nobody chose
        where.core.abort(listener.number)
    for listener in listeners:
        assert isinstance(end_of(listener)[1], RequestFinished)
    check_idle(where)


def test_an_aborted_request_says_so(pair: Pair) -> None:
    listener = Listener(pair.decode, greedy(prompt(40), 2000))
    assert isinstance(listener.until(OutputChunk), OutputChunk)
    pair.decode.core.abort(listener.number)
    finish = None
    while not isinstance(event := listener.next(), RequestFinished):
        assert isinstance(event, OutputChunk)
        finish = event.finish
    assert finish == "abort"
    check_idle(pair.decode)


@pytest.mark.parametrize("is_handed", [False, True], ids=["whole", "handed over"])
def test_preempted_answers_are_the_same(tight: Pair, folder: Path, is_handed: bool) -> None:
    before = tight.decode.counts()["preempted"]
    asked = prompts("pressure")
    requests = [greedy(each, NUM_TOKENS, salt=f"pressure {is_handed}") for each in asked]
    found = ask_all(tight if is_handed else tight.decode, requests)
    check_tokens(folder, asked, found)
    assert tight.decode.counts()["preempted"] > before
    check_idle(tight.prefill, tight.decode)


def test_preempted_samples_are_the_same(tight: Pair, pair: Pair) -> None:
    params = SamplingParams(
        temperature=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2, logprobs=1
    )
    requests = [EngineRequest(tuple(each), params, salt="samples") for each in prompts("samples")]
    before = tight.decode.counts()["preempted"]
    pressed, roomy = ask_all(tight, requests), ask_all(pair.prefill, requests)
    assert [each.tokens for each in pressed] == [each.tokens for each in roomy]
    assert tight.decode.counts()["preempted"] > before
    check_idle(tight.prefill, tight.decode)


def test_forks_under_pressure(tight: Pair, folder: Path) -> None:
    asked = prompts("forks")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)
    requests = [replace(greedy(each, 1, salt="forks"), params=params) for each in asked]
    found = ask_all(tight, requests)
    check_tokens(folder, asked, found)
    assert all(len(each.tokens) == 3 for each in found)
    check_idle(tight.prefill, tight.decode)


@pytest.mark.parametrize("seed", range(3))
def test_all_at_once_both_ways(tight: Pair, folder: Path, seed: int) -> None:
    """Hand-overs in both directions and whole requests, some given up, on pools that are too small."""
    chance = random.Random(seed)
    back = Pair(tight.decode, tight.prefill)
    running: list[tuple[list[int], Listener, bool]] = []
    for index in range(3 * NUM_ASKED):
        asked = prompt(chance.choice(LENGTHS), f"soak {chance.randrange(8)}")
        request = greedy(
            asked, chance.choice((2, 20, NUM_TOKENS)), salt=f"soak {seed}", n=chance.choice((1, 1, 2))
        )
        where = chance.choice([tight, back, tight.prefill, tight.decode])
        listeners = (
            BothSides(where, request).sides if isinstance(where, Pair) else (Listener(where, request),)
        )
        is_doomed = index % 5 == 0
        if is_doomed:
            time.sleep(chance.random() * 0.02)  # a moment that nobody chose
            doomed = chance.choice(listeners)
            doomed.instance.core.abort(doomed.number)
        running += [(asked, listener, is_doomed) for listener in listeners]
    wanted = oracle(folder, [asked for asked, _, _ in running], NUM_TOKENS)
    for (_, listener, is_doomed), answer in zip(running, wanted, strict=True):
        answers, end = ends_of(listener)
        assert is_doomed or isinstance(end, RequestFinished), end
        assert all(tokens == answer[: len(tokens)] for tokens in answers.values())
    check_idle(tight.prefill, tight.decode)
