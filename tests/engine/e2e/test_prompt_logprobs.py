"""Log-probabilities of prompts are those of `transformers`, in any layout and however the prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.breaking import broken
from tests.engine.e2e.instances import (
    Heard,
    InstancePool,
    Listener,
    Side,
    ask_all,
    ask_one,
    check_idle,
    greedy,
)
from tests.engine.e2e.prompts import LENGTHS, PAGE, check_tokens, prompt
from tests.engine.tiny import oracle_logprobs

from baton.engine.instance import Instance
from baton.engine.kv_cache import KVCacheManager
from baton.engine.requests import OutboundHandoff, OutputChunk
from baton.engine.sequence import Sequence
from baton.errors import ConfigError

pytestmark = pytest.mark.engine

NUM_TOP = 3


def check_logprobs(folder: Path, asked: list[int], heard: Heard) -> None:
    """Every answer came with the whole prompt but its first token."""
    expected = oracle_logprobs(folder, asked)
    for scored in heard.prompt_logprobs.values():
        assert [each.token for each in scored] == asked[1:]
        for row, each in enumerate(scored):
            assert each.logprob == pytest.approx(expected[row, each.token].item(), abs=1e-4), f"row {row}"
            best = expected[row].topk(NUM_TOP).values.tolist()
            assert sorted(each.top.values(), reverse=True)[:NUM_TOP] == pytest.approx(best, abs=1e-4)


def compare(folder: Path, instance: Instance, salt: str = "") -> None:
    prompts = [prompt(length, "scored") for length in (*LENGTHS, 2, PAGE * 5)]
    # The prefixes are in the cache then, and tokens without a score are beside the others.
    ask_all(instance, [greedy(each, 1, salt=salt) for each in prompts])
    plain = [greedy(each, 8, salt=salt) for each in prompts[:2]]
    scored = [greedy(each, 8, salt=salt, n=2, prompt_logprobs=NUM_TOP) for each in prompts]
    found = ask_all(instance, [*plain, *scored])
    check_tokens(folder, [*prompts[:2], *prompts], found, 8)
    for asked, heard in zip(prompts, found[2:], strict=True):
        check_logprobs(folder, asked, heard)
        assert heard.traces["both"].num_cached == 0
    assert not any(heard.prompt_logprobs[0] for heard in found[:2])


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "cp2", "cp2:split", "dp2.tp1", "pp2.tp2"])
def test_layouts(pool: InstancePool, folder: Path, layout: str) -> None:
    instance = pool.instance(Side(str(folder), layout).but(chunk_tokens=100))
    compare(folder, instance)
    check_idle(instance)


def test_a_prompt_that_is_preempted_is_scored_again(pool: InstancePool, folder: Path) -> None:
    instance = pool.instance(Side(str(folder)).but(chunk_tokens=8, pool_tokens=22 * PAGE))
    before = instance.counts()["preempted"]
    older = Listener(instance, greedy(prompt(PAGE, "older"), 250))
    older.until(OutputChunk)
    asked = prompt(300, "preempted")
    found = ask_one(instance, greedy(asked, 1, prompt_logprobs=NUM_TOP))
    check_logprobs(folder, asked, found)
    older.heard()
    assert instance.counts()["preempted"] > before
    check_idle(instance)


def test_what_is_handed_over_or_embedded_has_no_scores(pool: InstancePool, folder: Path) -> None:
    instance = pool.instance(Side(str(folder)).but(chunk_tokens=100))
    request = greedy(prompt(PAGE), 1, prompt_logprobs=0)
    instance.core.check(request)
    for more in ({"handoff": OutboundHandoff("1")}, {"embeddings": b"0000" * PAGE}):
        with pytest.raises(ConfigError, match="have one instance prefill and decode"):
            instance.core.check(replace(request, **more))


@pytest.mark.long
@pytest.mark.parametrize(("layout", "name"), [("tp1", "nothing"), ("tp1", "late"), ("tp2", "own_share")])
def test_the_comparison_sees_wrong_scores(
    monkeypatch: pytest.MonkeyPatch, folder: Path, layout: str, name: str
) -> None:
    side = Side(str(folder), layout, f"broken {name}").but(chunk_tokens=100)
    with broken(side, name, monkeypatch, "broken_scores") as instance:
        if name == "nothing":
            compare(folder, instance)
        else:
            with pytest.raises(AssertionError):
                compare(folder, instance)


def test_the_comparison_sees_a_prefix_hit(
    monkeypatch: pytest.MonkeyPatch, pool: InstancePool, folder: Path
) -> None:
    allocate = KVCacheManager.allocate

    def reusing(self: KVCacheManager, sequence: Sequence, **how: bool) -> bool:
        return allocate(self, sequence, **{**how, "num_reused_max": sequence.num_tokens - 1})

    monkeypatch.setattr(KVCacheManager, "allocate", reusing)
    with pytest.raises(AssertionError):
        compare(folder, pool.instance(Side(str(folder)).but(chunk_tokens=100)), salt="hit")
