"""What a request can ask for comes out the same handed over as on one instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.e2e.instances import Heard, InstancePool, Side, ask_all, ask_one, check_idle, greedy
from tests.engine.e2e.prompts import LENGTHS, NUM_TOKENS, check_tokens, prompt
from tests.engine.tiny import FAMILIES, oracle

from baton.checkpoint.opening import open_checkpoint
from baton.engine.deployment import Pair
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.engine

NUM_LAYERS = FAMILIES["llama"]["num_hidden_layers"]
CHUNK = 100
WARM = {"temperature": 0.9, "seed": 11, "max_tokens": 40, "ignore_eos": True}
SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 4.0, 6: -100.0}},
    "several": {"n": 3},
    "several, penalized": {"n": 3, "repetition_penalty": 1.5, "logprobs": 3},
    "with eos": {"n": 4, "ignore_eos": False, "max_tokens": 60, "logit_bias": {2: 3.0}},
}


@pytest.fixture(scope="module")
def pair(pool: InstancePool, folder: Path) -> Pair:
    plain = Side(str(folder)).but(chunk_tokens=CHUNK)
    return pool.pair(replace(plain, layout="pp2"), replace(plain, layout="tp2"))


@pytest.fixture
def whole(pair: Pair) -> Instance:
    return pair.decode


@pytest.fixture(autouse=True)
def _idle(pair: Pair) -> Iterator[None]:
    yield
    check_idle(pair.prefill, pair.decode)


def check_same(one: Heard, other: Heard) -> None:
    assert one.tokens == other.tokens
    assert one.finishes == other.finishes
    for index, answer in one.answers.items():
        for ours, theirs in zip(answer, other.answers[index], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.top == pytest.approx(theirs.top, abs=1e-4)


@pytest.mark.parametrize("name", SAMPLED)
def test_seeded_sampling(pair: Pair, whole: Instance, name: str) -> None:
    params = SamplingParams(**{**WARM, **SAMPLED[name]})
    requests = [EngineRequest(tuple(prompt(length)), params, salt=name) for length in LENGTHS]
    alone = [ask_one(whole, replace(each, salt="whole")) for each in requests]
    handed = ask_all(pair, requests)
    for one, other in zip(handed, alone, strict=True):
        check_same(one, other)
    assert all(len(each.tokens) == params.n for each in handed)
    assert all(len(set(map(tuple, each.tokens))) > params.n // 2 for each in handed), "answers do not differ"


def test_another_seed_is_another_answer(pair: Pair) -> None:
    asked = tuple(prompt(30))
    found = [
        ask_one(pair, EngineRequest(asked, SamplingParams(**{**WARM, "seed": seed}))) for seed in (1, 1, 2)
    ]
    assert found[0].tokens == found[1].tokens != found[2].tokens


def test_logprobs(pair: Pair, whole: Instance, folder: Path) -> None:
    asked = prompt(50)
    request = greedy(asked, 20, logprobs=5)
    alone, handed = ask_one(whole, replace(request, salt="whole")), ask_one(pair, request)
    check_same(handed, alone)
    for sampled in handed.answers[0]:
        assert len(sampled.top) >= 5
        assert sampled.top[sampled.token] == sampled.logprob == max(sampled.top.values())
    check_tokens(folder, [asked], [handed], 20)


@pytest.mark.parametrize("num_told", [None, 0, 3])
def test_the_first_token_is_told_alike_by_both_sides(pair: Pair, num_told: int | None) -> None:
    request = greedy(prompt(50), 4, logprobs=num_told)
    found = [ask_one(pair, request, first_token=side).answers[0] for side in ("prefill", "decode")]
    for ours, theirs in zip(*found, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top == pytest.approx(theirs.top, abs=1e-4)
        assert (ours.token in ours.top) == (num_told is not None)


def test_stop_at_the_first_token(pair: Pair, folder: Path) -> None:
    asked = prompt(40)
    first = oracle(folder, [asked], NUM_TOKENS)[0][0]
    heard = ask_one(pair, greedy(asked, NUM_TOKENS, stop_ids=(first,)))
    assert (heard.tokens, heard.finishes) == ([[first]], {0: "stop"})
    assert heard.traces["decode"].stepped_s == 0


def test_one_of_several_answers_stops_at_the_first_token(pair: Pair, whole: Instance) -> None:
    wild = {**WARM, "n": 3, "temperature": 2.0}
    request = EngineRequest(tuple(prompt(40)), SamplingParams(**wild))
    firsts = [answer[0] for answer in ask_one(whole, request).tokens]
    assert len(set(firsts)) == 3, "the seed gives equal first tokens; take another"
    request = replace(request, params=SamplingParams(**wild, stop_ids=(firsts[0],)))
    alone, handed = ask_one(whole, replace(request, salt="whole")), ask_one(pair, request)
    check_same(handed, alone)
    assert handed.tokens[0] == firsts[:1]
    assert handed.finishes[0] == "stop"


@pytest.mark.parametrize("where", [1, 5, NUM_TOKENS - 1])
def test_stop_later(pair: Pair, whole: Instance, folder: Path, where: int) -> None:
    asked = prompt(40)
    wanted = oracle(folder, [asked], NUM_TOKENS)[0]
    request = greedy(asked, NUM_TOKENS, stop_ids=(wanted[where],))
    length = wanted.index(wanted[where]) + 1
    for found in (ask_one(pair, request), ask_one(whole, request)):
        assert (found.tokens, found.finishes) == ([wanted[:length]], {0: "stop"})


def test_a_single_token_is_not_handed_over(pair: Pair, folder: Path) -> None:
    asked = prompt(40)
    heard = ask_one(pair, greedy(asked, 1))
    assert heard.tokens == [oracle(folder, [asked], NUM_TOKENS)[0][:1]]
    assert heard.finishes == {0: "length"}
    assert set(heard.traces) == {"prefill"}


@pytest.mark.parametrize("length", [1, 40, 250])
def test_embeddings_in_place_of_tokens(pair: Pair, whole: Instance, folder: Path, length: int) -> None:
    asked = prompt(length)
    table = open_checkpoint(str(folder)).read("model.embed_tokens.weight").to(torch.float32)
    rows = table[torch.tensor(asked)].numpy().astype(np.float32).tobytes()
    request = replace(greedy([0] * length, NUM_TOKENS), embeddings=rows)
    found = [ask_one(whole, request), ask_one(pair, request), ask_one(pair, request)]
    check_tokens(folder, [asked] * 3, found)
    assert found[-1].traces["prefill"].num_cached == found[-1].traces["decode"].num_held == 0


@pytest.mark.parametrize(
    "how", [{"is_pipelined": False}, {"first_token": "decode"}, {"policy": "off"}], ids=str
)
def test_ways_of_asking(pair: Pair, folder: Path, how: dict[str, Any]) -> None:
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=str(how)) for each in asked], **how)
    check_tokens(folder, asked, found)
    if "first_token" not in how:
        assert all(each.traces["prefill"].unpipelined for each in found)


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:2", "adaptive", "cost"])
def test_policies(pair: Pair, folder: Path, policy: str) -> None:
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=policy) for each in asked], policy=policy)
    check_tokens(folder, asked, found)
    long = ask_one(pair, greedy(prompt(250), 2, salt=policy), policy=policy).traces["prefill"]
    groups = [each for found in long.groups.values() for each in found]
    covered = sum(stop - start for start, stop in (group.layers for group in groups))
    assert covered == NUM_LAYERS * -(-250 // CHUNK), "not every layer of every chunk is told of once"
    if policy == "fixed:1":
        assert not long.unpipelined
        assert all(stop - start == 1 for start, stop in (group.layers for group in groups))
