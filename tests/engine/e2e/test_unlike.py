"""Pairs whose KV caches differ in page size, storage order and dtype, with checksums on what arrives.

Where both sides store fp32, the oracle is `transformers`. Where the decode instance stores bf16 or fp8, it is
that instance by itself, without a hand-over. A prompt that is prefilled in one step attends to its own keys
before they are stored, so prefill computes the same logits and the same K and V whatever the cache's dtype
is, and the hand-over rounds them as storing does. Two kinds of prompts are exceptions, since prefill then
reads what it has stored: a prompt of one token, and a prompt of several chunks. They agree where both sides
store the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import InstancePool, Side, ask_all, ask_one, check_idle, greedy
from tests.engine.e2e.prompts import LENGTHS, check_tokens, difference, prompt
from tests.engine.hybrids import hybrid
from tests.engine.tiny import tiny

from baton.engine.deployment import Pair
from baton.errors import EngineError

pytestmark = pytest.mark.engine

NUM_TOKENS = 32
GQA, MLA, HYBRID = "llama", "deepseek_v3", "qwen3_5_moe_text"


def sides(folder: Path, prefill: dict[str, object], decode: dict[str, object]) -> tuple[Side, Side]:
    """Prefill with pages of 16 tokens, K and V fused; decode with 64 and apart, and checksums."""
    plain = Side(str(folder))
    other = replace(plain, name="unlike").but(page_tokens=64, kv_layout="hnd.apart", is_verified=True)
    return plain.but(**prefill), other.but(**decode)


def check_alone(pair: Pair, lengths: tuple[int, ...]) -> None:
    """The pair answers as its decode instance does alone."""
    for length in lengths:
        request = greedy(prompt(length), NUM_TOKENS)
        (handed,) = ask_one(pair, request).tokens
        (alone,) = ask_one(pair.decode, replace(request, salt="alone")).tokens
        assert handed == alone, f"prompt of {length} tokens: {difference(handed, alone)}"
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("transport", ["shm", "tcp", "mooncake", "nixl"])
@pytest.mark.parametrize(("family", "layout"), [(GQA, "tp2"), (MLA, "pp2"), (GQA, "cp2")])
def test_pages_and_storage_order(pool: InstancePool, family: str, layout: str, transport: str) -> None:
    folder = tiny(family)
    prefill, decode = sides(folder, {"transport": transport}, {"transport": transport})
    pair = pool.pair(replace(prefill, layout=layout), decode)
    prompts = [prompt(length) for length in LENGTHS]
    answers = ask_all(pair, [greedy(tokens, NUM_TOKENS, salt=layout) for tokens in prompts])
    check_tokens(folder, prompts, answers, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


def test_packing_by_cost(pool: InstancePool) -> None:
    folder = tiny(GQA)
    prefill, decode = sides(folder, {}, {"packing": "cost"})
    pair = pool.pair(replace(prefill, layout="tp2"), decode)
    prompts = [prompt(length) for length in LENGTHS]
    answers = ask_all(pair, [greedy(tokens, NUM_TOKENS, salt="packed") for tokens in prompts])
    check_tokens(folder, prompts, answers, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("transport", ["shm", "tcp", "mooncake", "nixl"])
@pytest.mark.parametrize("family", [GQA, MLA])
def test_fp32_to_bf16(pool: InstancePool, family: str, transport: str) -> None:
    options = {"kv_cache_dtype": "bf16", "transport": transport}
    check_alone(pool.pair(*sides(tiny(family), {"transport": transport}, options)), LENGTHS[1:])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("family", [GQA, MLA])
def test_both_store_the_same(pool: InstancePool, family: str, dtype: str) -> None:
    options = {"kv_cache_dtype": dtype, "chunk_tokens": 100}
    check_alone(pool.pair(*sides(tiny(family), options, options)), LENGTHS)


@pytest.mark.parametrize("family", [GQA, MLA, HYBRID])
def test_fp32_to_fp8(pool: InstancePool, family: str) -> None:
    folder = hybrid(family) if family == HYBRID else tiny(family)
    check_alone(pool.pair(*sides(folder, {}, {"kv_cache_dtype": "fp8_e4m3"})), LENGTHS[1:])


@pytest.mark.parametrize("family", [GQA, MLA])
def test_fp8_to_bf16(pool: InstancePool, family: str) -> None:
    """The prompt has been rounded to fp8; what is decoded first is what an fp8 cache gives."""
    fp8, bf16 = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bf16"}
    pair = pool.pair(*sides(tiny(family), fp8, bf16))
    for length in LENGTHS[1:]:
        request = greedy(prompt(length), NUM_TOKENS)
        (handed,) = ask_one(pair, request).tokens
        (alone,) = ask_one(pair.prefill, replace(request, salt="alone")).tokens
        assert handed[:2] == alone[:2]
        assert len(handed) == NUM_TOKENS
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("layouts", [("tp2", "tp1"), ("tp1", "cp2"), ("dp2.tp1", "pp2")], ids=" to ".join)
def test_layouts_differ_too(pool: InstancePool, layouts: tuple[str, str]) -> None:
    """Other sums may round to another bf16, so only the first token is sure; two runs agree."""
    folder = tiny(GQA)
    prefill, decode = sides(folder, {}, {"kv_cache_dtype": "bf16"})
    pair = pool.pair(replace(prefill, layout=layouts[0]), replace(decode, layout=layouts[1]))
    prompts = [prompt(length) for length in LENGTHS]
    first, again = (
        [ask_one(pair, greedy(tokens, NUM_TOKENS, salt=salt)).tokens for tokens in prompts] for salt in "ab"
    )
    assert first == again
    heads = ask_all(pair, [greedy(tokens, 1) for tokens in prompts])
    check_tokens(folder, prompts, heads, 1)
    assert [tokens[0][:1] for tokens in first] == [head.tokens[0] for head in heads]
    check_idle(pair.prefill, pair.decode)


def test_compute_dtypes_differ(pool: InstancePool) -> None:
    """bf16 weights prefill, fp32 weights decode: the first token is prefill's, and it runs."""
    pair = pool.pair(*sides(tiny(GQA), {"dtype": "bf16"}, {}))
    request = greedy(prompt(40), NUM_TOKENS)
    (handed,) = ask_one(pair, request).tokens
    assert handed[:1] == ask_one(pair.prefill, greedy(prompt(40), 1, salt="alone")).tokens[0]
    assert len(handed) == NUM_TOKENS
    check_idle(pair.prefill, pair.decode)


def test_too_little_staging_fails_with_the_remedy(pool: InstancePool) -> None:
    folder = tiny(GQA, head_dim=64, num_key_value_heads=6)  # 15 KiB a token
    pair = pool.pair(*sides(folder, {}, {"kv_cache_dtype": "bf16", "staging_mb": 1}))
    with pytest.raises(EngineError, match=r"bytes of staging, .* give the target more"):
        ask_one(pair, greedy(prompt(300), 8))
    check_idle(pair.prefill, pair.decode)
    assert len(ask_one(pair, greedy(prompt(16), 8)).tokens[0]) == 8
