"""The text of an answer is the same handed over as on one instance, stop strings and all."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.e2e.instances import Heard, InstancePool, Side, ask_all, check_idle
from tests.engine.text.vocabularies import byte_level
from tests.engine.tiny import tiny

from baton.engine.deployment import Pair
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.engine

NUM_ASKED = 8
PROMPT = "the quick brown fox caf\u00e9 \u4f60\u597d"


@pytest.fixture(scope="module")
def pair(pool: InstancePool, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("text") / "llama"
    backend = byte_level()
    shutil.copytree(tiny("llama", vocab_size=len(backend)), folder)
    backend.save_pretrained(folder)
    plain = Side(str(folder)).but(chunk_tokens=16)
    return pool.pair(plain, replace(plain, name="two"))


def requests(**params: Any) -> list[EngineRequest]:
    tokens = tuple(byte_level().encode(PROMPT))
    wanted = {"temperature": 0.8, "max_tokens": 40, "ignore_eos": True, **params}
    return [EngineRequest(tokens, SamplingParams(seed=seed, **wanted)) for seed in range(NUM_ASKED)]


def check_same(found: list[Heard], wanted: list[Heard]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.texts, one.tokens, one.finishes) == (other.texts, other.tokens, other.finishes)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"ignore_eos": False, "logit_bias": {0: 1.0}}], ids=str)
def test_whole_text(pair: Pair, params: dict[str, Any], first_token: str) -> None:
    asked = requests(**params)
    found = ask_all(pair, asked, first_token=first_token)
    check_same(found, ask_all(pair.decode, asked))
    assert any(len(text) > 10 for each in found for text in each.texts.values())
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize("where", [0, 1, 2, 10])
def test_stop_strings(pair: Pair, first_token: str, where: int) -> None:
    """A stop string of two characters, begun at the first one, the second one and further on."""
    texts = [each.texts[0] for each in ask_all(pair.decode, requests())]
    stops = tuple({text[where : where + 2] for text in texts if len(text) > where + 2})
    asked = requests(stop=stops)
    found = ask_all(pair, asked, first_token=first_token)
    check_same(found, ask_all(pair.decode, asked))
    assert sum(each.finishes[0] == "stop" for each in found) >= len(stops)
    for each, text in zip(found, texts, strict=True):
        assert text.startswith(each.texts[0])
        assert not any(stop in each.texts[0] for stop in stops)
    check_idle(pair.prefill, pair.decode)
