"""A little of everything that the other files here go through, for every run of the tests.

Each test starts the instances that it needs, so that tests may run in processes of their own.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from tests.engine.e2e.breaking import compare
from tests.engine.e2e.instances import (
    BothSides,
    InstancePool,
    Side,
    ask_all,
    ask_one,
    check_idle,
    end_of,
    greedy,
    opened,
)
from tests.engine.e2e.prompts import LENGTHS, PAGE, check_tokens, prompt
from tests.engine.tiny import oracle, tiny

from baton.engine.deployment import Pair
from baton.engine.requests import EngineRequest, OutputChunk, RequestError
from baton.engine.sampling_params import SamplingParams

NUM_TOKENS = 24
LONG = LENGTHS[-1]
SAMPLED = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=NUM_TOKENS, logprobs=2)


def opened_pair(pool: InstancePool, family: str, prefill: str, decode: str) -> Pair:
    plain = Side(str(tiny(family))).but(chunk_tokens=100)
    return pool.pair(replace(plain, layout=prefill), replace(plain, layout=decode))


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("llama", "pp2", "tp2"),
        ("deepseek_v3", "tp2", "cp2:stripe1"),
        pytest.param("qwen3_moe", "cp2", "dp2.tp1", marks=pytest.mark.long),
    ],
)
def test_tokens(family: str, prefill: str, decode: str) -> None:
    folder = tiny(family)
    asked = [prompt(length) for length in LENGTHS]
    longer = [*asked[-1], *prompt(PAGE + 3, "tail")]
    with opened() as pool:
        pair = opened_pair(pool, family, prefill, decode)
        handed = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
        check_tokens(folder, asked, handed, NUM_TOKENS)
        again = ask_one(pair, greedy(longer, NUM_TOKENS))
        check_tokens(folder, [longer], [again], NUM_TOKENS)
        for copies in again.traces["prefill"].copies.values():
            routes = [(copy.chunk, copy.target_rank) for copy in copies]
            assert len(set(routes)) == len(routes), "K and V of a group go in one copy"
        assert again.traces["prefill"].num_cached >= LONG - LONG % (2 * PAGE)
        if "dp" not in decode:
            assert again.traces["decode"].num_held >= LONG - LONG % (2 * PAGE)
        whole = ask_all(pair.decode, [greedy(each, NUM_TOKENS, salt="whole") for each in asked])
        check_tokens(folder, asked, whole, NUM_TOKENS)
        request = EngineRequest(tuple(asked[-2]), SAMPLED)
        assert ask_one(pair, request).answers.keys() == {0, 1, 2}
        assert ask_one(pair, request).tokens == ask_one(pair.decode, request).tokens
        check_idle(pair.prefill, pair.decode)


def test_unlike_storage() -> None:
    """Other pages, another storage order and checksums; and a KV cache that is converted (test_unlike.py)."""
    folder = tiny("llama")
    plain = Side(str(folder))
    unlike = replace(plain, name="unlike").but(page_tokens=64, kv_layout="hnd.apart", is_verified=True)
    requests = [greedy(prompt(length), NUM_TOKENS) for length in LENGTHS[1:]]
    with opened() as pool:
        pair = pool.pair(replace(plain, layout="tp2"), unlike)
        check_tokens(folder, [each.tokens for each in requests], ask_all(pair, requests), NUM_TOKENS)
        pair = pool.pair(plain, unlike.but(kv_cache_dtype="bf16"))
        handed = [ask_one(pair, request).tokens for request in requests]
        assert handed == [ask_one(pair.decode, replace(each, salt="alone")).tokens for each in requests]
        check_idle(pair.prefill, pair.decode)


def test_ends() -> None:
    folder, asked = tiny("llama"), prompt(40)
    wanted = oracle(folder, [asked], NUM_TOKENS)[0]
    with opened() as pool:
        pair = opened_pair(pool, "llama", "tp1", "pp2")
        stopped = ask_one(pair, greedy(asked, NUM_TOKENS, stop_ids=(wanted[0],)))
        assert (stopped.tokens, stopped.finishes) == ([wanted[:1]], {0: "stop"})
        single = ask_one(pair, greedy(asked, 1))
        assert (single.tokens, single.finishes) == ([wanted[:1]], {0: "length"})
        assert "decode" not in single.traces
        for side in (0, 1):
            handed = BothSides(pair, greedy(prompt(LONG), 2000))
            listener = handed.sides[side]
            listener.instance.core.abort(listener.number)
            for each in handed.sides:
                end_of(each)
            check_idle(pair.prefill, pair.decode)
        dying = BothSides(pair, greedy(asked, 2000))
        for _ in range(2):  # the first token comes before the cache, the second one from decode
            assert isinstance(dying.decode.until(OutputChunk), OutputChunk)
        os.kill(pair.decode.pids[1], signal.SIGKILL)
        trouble = dying.decode.until(RequestError)
        assert isinstance(trouble, RequestError)
        assert "rank 1" in trouble.text
        check_idle(pair.prefill)


@pytest.mark.long
def test_a_broken_handoff_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama")
    with opened() as pool:
        sound = pool.instance(Side(str(folder)))
        for name in ("first_token", "source_pages"):
            with pytest.raises(AssertionError, match="answer 0: token"):
                compare(folder, sound, name, monkeypatch)
