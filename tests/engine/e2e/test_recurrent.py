"""Models with recurrent state, handed over between layouts: the tokens of `transformers`.

Prompts are shorter and longer than a convolution reaches back, and chunks end inside of its reach.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import InstancePool, Side, ask_all, ask_one, check_idle, greedy
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.engine.fp8 import quantised
from tests.engine.hybrids import HYBRIDS, REACH, hybrid, multimodal

pytestmark = pytest.mark.engine

LENGTHS = (1, REACH - 1, REACH, REACH + 1, 17, 200)
NUM_TOKENS = 32
CHUNK = 64
SHORT = REACH - 1
"""Tokens of a chunk whose neighbours a convolution reaches across."""
PAIRS = [
    ("tp1", "tp1"),
    ("tp1", "tp2"),
    ("tp2", "tp1"),
    ("pp2", "tp1"),
    ("tp2", "pp2"),
    ("dp2.tp1", "tp2"),
]
CASES = [(family, *pair) for family in HYBRIDS for pair in PAIRS]
FURTHER = [
    ("qwen3_5_text", "tp2", "tp6"),
    ("falcon_h1", "tp6", "tp2"),
    ("qwen3_5_text", "cp2:mirror", "tp1"),
    ("falcon_h1", "cp2:stripe1", "tp2"),
    ("falcon_h1", "tp1", "cp2:stripe1"),
    ("qwen3_next", "cp2:split", "tp2"),
    ("qwen3_next", "pp2.cp2.tp2", "dp2.tp2"),
]


def sides(folder: Path, prefill: str, decode: str) -> tuple[Side, Side]:
    plain = Side(str(folder)).but(chunk_tokens=CHUNK)
    first, second = replace(plain, layout=prefill), replace(plain, layout=decode)
    return first, second if second != first else replace(second, name="two")


def test_an_fp8_checkpoint_with_images(pool: InstancePool, tmp_path: Path) -> None:
    fp8, dequantised = quantised(multimodal("qwen3_5_moe"), tmp_path)
    pair = pool.pair(*sides(fp8, "tp2", "pp2"))
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(dequantised, asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(("family", "prefill", "decode"), [*CASES, *FURTHER])
def test_tokens(pool: InstancePool, family: str, prefill: str, decode: str) -> None:
    folder = hybrid(family)
    pair = pool.pair(*sides(folder, prefill, decode))
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    again = ask_one(pair, greedy(asked[-1], NUM_TOKENS))
    check_tokens(folder, [asked[-1]], [again], NUM_TOKENS)
    assert {role: (story.num_cached, story.num_held) for role, story in again.traces.items()} == {
        "prefill": (0, 0),
        "decode": (0, 0),
    }
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("family", HYBRIDS)
def test_chunks_end_inside_of_a_convolutions_reach(pool: InstancePool, family: str) -> None:
    folder = hybrid(family)
    prefill, decode = sides(folder, "tp1", "tp1")
    pair = pool.pair(prefill.but(chunk_tokens=SHORT), decode)
    asked = [prompt(length, "short") for length in (SHORT, SHORT + 1, 2 * SHORT + 1, 15)]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_fork(pool: InstancePool, family: str) -> None:
    folder = hybrid(family)
    pair = pool.pair(*sides(folder, "tp1", "tp2"))
    asked = prompt(23, "fork")
    heard = ask_one(pair, greedy(asked, NUM_TOKENS, n=3))
    assert len(heard.tokens) == 3
    check_tokens(folder, [asked], [heard], NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)
