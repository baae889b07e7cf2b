"""An answer that was broken off anywhere goes on as if nothing had happened, on any instance."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.e2e.instances import (
    BothSides,
    Heard,
    InstancePool,
    Listener,
    Side,
    ask_all,
    ask_one,
    check_idle,
    end_of,
)
from tests.engine.text.vocabularies import byte_level
from tests.engine.tiny import tiny

from baton.engine.deployment import Pair
from baton.engine.requests import EngineRequest, OutputChunk, RequestFinished
from baton.engine.sampling_params import SamplingParams
from baton.errors import ConfigError

pytestmark = pytest.mark.engine

PROMPT = "the quick brown fox caf\u00e9 \u4f60\u597d"
NUM_TOKENS = 14
COPY_BYTES_PER_S = 4e3
"""A prompt of a thousand tokens takes minutes."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 7},
    "penalties": {
        "seed": 3,
        "temperature": 2.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "logit_bias": dict.fromkeys(range(100, 108), 12.0),
        "logprobs": 2,
    },
    "min tokens": {"seed": 4, "ignore_eos": False, "min_tokens": 9, "logit_bias": {0: 9.0}},
}


@pytest.fixture(scope="module")
def pair(pool: InstancePool, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("resume") / "llama"
    backend = byte_level()
    shutil.copytree(tiny("llama", vocab_size=len(backend)), folder)
    backend.save_pretrained(folder)
    plain = Side(str(folder)).but(chunk_tokens=16)
    return pool.pair(plain, replace(plain, name="two", layout="pp2"))


@pytest.fixture(autouse=True)
def _idle(pair: Pair) -> Iterator[None]:
    yield
    check_idle(pair.prefill, pair.decode)


def asked(**params: Any) -> EngineRequest:
    tokens = tuple(byte_level().encode(PROMPT))
    wanted = {"temperature": 0.9, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return EngineRequest(tokens, SamplingParams(**wanted))


def pieces(pair: Pair, request: EngineRequest) -> list[OutputChunk]:
    """What is told token by token, uninterrupted."""
    listener = Listener(pair.decode, request)
    found: list[OutputChunk] = []
    while not isinstance(event := listener.next(), RequestFinished):
        assert isinstance(event, OutputChunk), event
        found.append(event)
    return found


def check_seam(whole: list[OutputChunk], num_told: int, rest: Heard) -> None:
    """The rest is exactly what was told after so many pieces."""
    wanted = Heard()
    for piece in whole[num_told:]:
        wanted.add(piece)
    where = f"broken off after {num_told} tokens"
    assert rest.tokens == wanted.tokens, where
    assert rest.finishes == wanted.finishes, where
    assert rest.texts == wanted.texts, where
    index = next(iter(wanted.answers))
    for ours, theirs in zip(rest.answers[index], wanted.answers[index], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4), where
        assert ours.top == pytest.approx(theirs.top, abs=1e-4), where


def broken_off(request: EngineRequest, whole: list[OutputChunk]) -> list[EngineRequest]:
    """The request after each of its pieces but the last."""
    tokens = [sampled.token for piece in whole for sampled in piece.tokens]
    return [replace(request, generated=tuple(tokens[:count])) for count in range(1, len(tokens))]


def check_every_cut(pair: Pair, request: EngineRequest) -> list[OutputChunk]:
    """On one instance and handed over, first token early and late."""
    whole = pieces(pair, request)
    rests = broken_off(request, whole)
    assert rests, "an answer of one token cannot be broken off"
    for first_token in ("prefill", "decode", ""):
        how = {"first_token": first_token} if first_token else {}
        where = pair if first_token else pair.prefill
        for count, rest in enumerate(ask_all(where, rests, **how), start=1):
            check_seam(whole, count, rest)
    return whole


@pytest.mark.parametrize("way", WAYS)
def test_every_place(pair: Pair, way: str) -> None:
    whole = check_every_cut(pair, asked(**WAYS[way]))
    if way == "min tokens":
        assert whole[-1].finish == "stop"
        assert len(whole) >= WAYS[way]["min_tokens"]


def test_a_character_cut_in_the_middle(pair: Pair) -> None:
    """Every token is a byte, and the answer is of characters that take three."""
    one = byte_level().encode("\u4e16\u754c\u4f60", add_special_tokens=False)
    bytes_of = sorted({byte_level().convert_tokens_to_ids(letter) for letter in "\u00e4\u00b8\u0138"})
    found = [
        pieces(pair, asked(seed=seed, logit_bias=dict.fromkeys([*one, *bytes_of], 6.0))) for seed in range(6)
    ]
    held = [sum(1 for piece in whole[:-1] if not piece.text) for whole in found]
    assert max(held) >= 2, "no character was cut; bias others"
    seed = held.index(max(held))
    check_every_cut(pair, asked(seed=seed, logit_bias=dict.fromkeys([*one, *bytes_of], 6.0)))


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_stop_string_across_the_seam(pair: Pair, where: int) -> None:
    plain = pieces(pair, asked(seed=1))
    text = "".join(piece.text for piece in plain)
    begins = sum(len(piece.text) for piece in plain[: where + 3])
    stop = text[begins : begins + 6]
    assert len(stop) == 6, f"the answer is too short: {text!r}"
    whole = check_every_cut(pair, asked(seed=1, stop=(stop,)))
    assert whole[-1].finish == "stop"
    assert "".join(piece.text for piece in whole) == text[: text.index(stop)]


def test_a_stop_string_that_was_only_begun(pair: Pair) -> None:
    """Text that was held back at the seam is told by the rest."""
    text = "".join(piece.text for piece in pieces(pair, asked(seed=1)))
    whole = check_every_cut(pair, asked(seed=1, stop=(text[4:9] + "\u00ff",)))
    assert "".join(piece.text for piece in whole) == text


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_several_answers(pair: Pair, index: int) -> None:
    request = asked(n=3, seed=9, temperature=1.5, repetition_penalty=1.2)
    every = pieces(pair, request)
    whole = [piece for piece in every if piece.index == index]
    assert len({tuple(s.token for p in every if p.index == i for s in p.tokens) for i in range(3)}) == 3
    alone = replace(asked(n=1, seed=9, temperature=1.5, repetition_penalty=1.2), index=index)
    for where in (pair, pair.prefill):
        check_seam(whole, 0, ask_one(where, alone))
        for count, rest in enumerate(ask_all(where, broken_off(alone, whole)), start=1):
            check_seam(whole, count, rest)


def test_the_last_token_ends_at_the_source(pair: Pair) -> None:
    """Only one token is left, or it is an end: nothing is decoded at the target, which tells it."""
    request = asked(seed=7)
    whole = pieces(pair, request)
    rest = broken_off(request, whole)[-1]
    handed = BothSides(pair, rest)
    heard = handed.decode.heard()
    check_seam(whole, NUM_TOKENS - 1, heard)
    assert heard.traces["both"].stepped_s == 0
    assert isinstance(handed.prefill.until(RequestFinished), RequestFinished)


def test_the_last_token_waits_for_no_copy(pool: InstancePool, pair: Pair) -> None:
    """A source knows that the token ends the answer, although it is not the answer's first."""
    side = Side(pair.prefill.config.model, name="slow").but(link_bytes_per_s=COPY_BYTES_PER_S)
    slow = Pair(pool.instance(side), pair.decode)
    request = EngineRequest(
        tuple(range(5, 105)) * 10, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )
    handed = BothSides(slow, replace(request, generated=(7, 8)))
    assert handed.decode.heard().finishes == {0: "length"}
    assert isinstance(end_of(handed.prefill)[1], RequestFinished), (
        "the copies were waited for until the deadline"
    )
    check_idle(slow.prefill)


def test_the_context_counts_what_was_generated(pair: Pair) -> None:
    request = asked(seed=7, max_tokens=4000)
    with pytest.raises(ConfigError, match="together at most"):
        pair.decode.core.submit(replace(request, params=SamplingParams(max_tokens=4095)), print)
    generated = (5,) * (pair.decode.sizes.context_max - len(request.tokens))
    params = SamplingParams(max_tokens=5000)
    with pytest.raises(ConfigError, match="one of them for the answer"):
        pair.decode.core.submit(replace(request, params=params, generated=generated), print)


@pytest.mark.parametrize(
    ("changes", "params", "words"),
    [
        ({"generated": (5,) * NUM_TOKENS}, {}, "complete"),
        ({"generated": (5, 0)}, {"ignore_eos": False}, "ends the answer"),
        ({"generated": (5, 8)}, {"stop_ids": (8,)}, "ends the answer"),
        ({"generated": (5,)}, {"n": 2}, "n is 2"),
        ({"index": 1}, {"n": 2}, "n is 2"),
        ({"index": -1}, {}, "index -1"),
        ({"generated": (5, 10**6)}, {}, "1000000 of the answer"),
    ],
    ids=["complete", "eos", "stop id", "several", "index of several", "negative index", "no such token"],
)
def test_a_rest_that_cannot_be(
    pair: Pair, changes: dict[str, Any], params: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pair.decode.core.submit(replace(asked(**params), **changes), print)
