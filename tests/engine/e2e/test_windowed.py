"""Models with windows, handed over between layouts: tokens of `transformers`, and no page beyond a window.

Chunks are shorter than the window and no multiple of a page, so that prompts cross its edge inside of both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.e2e.instances import (
    CROSSINGS,
    InstancePool,
    Side,
    ask_all,
    ask_one,
    check_idle,
    greedy,
)
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.engine.tiny import WINDOW, WINDOWED, windowed

from baton.engine.deployment import Pair
from baton.engine.kv_cache import KVCacheManager
from baton.engine.pages import PageGeometry
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.errors import EngineError

pytestmark = pytest.mark.engine

PAGE, CHUNK = 8, 20
LONG = 6 * WINDOW + 6
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * CHUNK, LONG)
NUM_TOKENS = WINDOW + 16
GROUP = f"tokens.w{WINDOW}"


@pytest.fixture(scope="module", params=WINDOWED)
def family(request: pytest.FixtureRequest) -> str:
    """One after the other, so that tests of a family share its instances."""
    return str(request.param)


def sides(family: str, prefill: str, decode: str, pages: tuple[int, int] = (PAGE, PAGE)) -> tuple[Side, Side]:
    plain = Side(str(windowed(family))).but(chunk_tokens=CHUNK, pool_tokens=2048)
    first = replace(plain, layout=prefill, name="prefill").but(page_tokens=pages[0])
    return first, replace(plain, layout=decode, name="decode").but(page_tokens=pages[1])


def check_pair(pair: Pair, family: str, salt: str) -> None:
    folder = windowed(family)
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=salt) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("crossing", CROSSINGS, ids=" to ".join)
def test_tokens(pool: InstancePool, family: str, crossing: tuple[str, str]) -> None:
    check_pair(pool.pair(*sides(family, *crossing)), family, str(crossing))


@pytest.mark.parametrize("pages", [(PAGE, 3), (5, PAGE), (16, 64)], ids=str)
def test_pages_of_other_sizes(pool: InstancePool, pages: tuple[int, int]) -> None:
    check_pair(pool.pair(*sides("gemma3_text", "tp1", "tp1", pages)), "gemma3_text", str(pages))


@pytest.mark.parametrize("layout", ["tp1", "tp2", "cp2:mirror", "cp2:stripe1", "cp2:split"])
def test_undisaggregated(pool: InstancePool, family: str, layout: str) -> None:
    folder = windowed(family)
    where = pool.instance(sides(family, "tp1", layout)[1])
    asked = [prompt(length) for length in LENGTHS]
    check_tokens(folder, asked, ask_all(where, [greedy(each, NUM_TOKENS) for each in asked]), NUM_TOKENS)
    check_idle(where)


def test_answers_that_fork_beyond_the_window(pool: InstancePool) -> None:
    pair = pool.pair(*sides("gemma3_text", "tp1", "tp1"))
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = EngineRequest(tuple(prompt(LONG)), params)
    handed, whole = ask_one(pair, request), ask_one(pair.decode, request)
    assert handed.answers.keys() == {0, 1, 2}
    assert handed.tokens == whole.tokens
    assert len({tuple(each) for each in handed.tokens}) == 3
    check_idle(pair.prefill, pair.decode)


def test_only_the_window_travels(pool: InstancePool) -> None:
    pair = pool.pair(*sides("gemma3_text", "tp1", "tp1"))
    config = WINDOWED["gemma3_text"]
    for length in LENGTHS:
        heard = ask_one(pair, greedy(prompt(length), 2))
        num_bytes = sum(
            copy.num_bytes for copies in heard.traces["prefill"].copies.values() for copy in copies
        )
        token_bytes = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
        num_windowed = config["layer_types"].count("sliding_attention")
        num_full = config["num_hidden_layers"] - num_windowed
        assert num_bytes == token_bytes * (num_full * length + num_windowed * min(length, WINDOW))


class Watch:
    """Pages in use of an instance's first dp group, after each of its steps, by the group of their tables."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[KVCacheManager, list[tuple[int, dict[str, int]]]] = {}
        complete = Scheduler.complete

        def watched(scheduler: Scheduler, *what: Any) -> None:
            complete(scheduler, *what)
            used = {group: pool.counts().num_used for group, pool in scheduler.kv_cache.pools.items()}
            most = max((each.num_computed for each in scheduler.sequences.values()), default=0)
            self.seen.setdefault(scheduler.kv_cache, []).append((most, used))

        patch.setattr(Scheduler, "complete", watched)


def test_pages_before_the_window_are_free(pool: InstancePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pool.pair(*sides("gemma3_text", "tp1", "tp1"))
    watch = Watch(monkeypatch)
    heard = ask_one(pair, greedy(prompt(LONG), NUM_TOKENS))
    check_tokens(windowed("gemma3_text"), [prompt(LONG)], [heard], NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)
    first, second = (watch.seen[each.core.schedulers[0].kv_cache] for each in (pair.prefill, pair.decode))
    whole = -(-LONG // PAGE)
    # A source holds on to what it will write, and lets go of what no later token looks at.
    # It may have let go of everything before its last step is heard of: the copies of that step take no time.
    assert [num for num, _ in first[:-1]] == [*range(CHUNK, LONG, CHUNK)]
    assert first[-1][0] in (LONG, 0)
    first = [each for each in first if each[0]]
    assert [used[GROUP] for _, used in first] == [whole - max(0, num - WINDOW) // PAGE for num, _ in first]
    assert {used["tokens"] for _, used in first} == {whole}
    assert [num for num, _ in second] == list(range(LONG + 1, LONG + NUM_TOKENS))
    for num, used in second:
        assert used["tokens"] == -(-num // PAGE)
        assert used[GROUP] == -(-num // PAGE) - (num - WINDOW) // PAGE
    assert max(used[GROUP] for _, used in second) <= -(-WINDOW // PAGE) + 1


def test_undisaggregated_prompts_take_a_chunk_more_than_the_window(
    pool: InstancePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = pool.instance(sides("gemma3_text", "tp1", "tp1")[1])
    watch = Watch(monkeypatch)
    ask_one(where, greedy(prompt(LONG), 2))
    check_idle(where)
    for num, used in watch.seen[where.core.schedulers[0].kv_cache]:
        assert used[GROUP] <= -(-(WINDOW + CHUNK) // PAGE) + 1, num


def _early(self: PageGeometry, group: str, num_tokens: int, prompt_tokens: int) -> int:
    """As if the window were two pages shorter: what is one too early is written over in the same order."""
    return _num_passed(self, group, num_tokens + 2 * PAGE, prompt_tokens)


_num_passed = PageGeometry.num_out_of_window


def test_pages_freed_too_early_are_seen(pool: InstancePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pool.pair(*sides("mistral", "tp1", "tp1"))
    check_pair(pair, "mistral", "in time")

    def early(self: KVCacheManager, sequence: Sequence) -> None:
        passed = _early(self.geometry, GROUP, sequence.num_computed, sequence.num_prompt)
        before = sequence.num_freed[GROUP]
        if passed > before:
            self.pools[GROUP].free(sequence.pages[GROUP][before:passed])
            sequence.num_freed[GROUP] = passed

    monkeypatch.setattr(KVCacheManager, "free_out_of_window", early)
    with pytest.raises(AssertionError, match="answer 0: token"):
        check_pair(pair, "mistral", "early")


def test_a_window_that_is_to_arrive_in_nobodys_pages_is_refused(
    pool: InstancePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pair of its own: the refused transfer has page 0 for a while, and the scheduler does not know it.
    pair = pool.pair(*(replace(side, name=f"spoiled-{side.name}") for side in sides("mistral", "tp1", "tp1")))
    monkeypatch.setattr(PageGeometry, "num_out_of_window", _early)
    # Alone: where several are refused at once, one may fail because the paths of another were replaced.
    with pytest.raises(EngineError, match=f"'{GROUP}' .* gives page 0 to two places"):
        ask_one(pair, greedy(prompt(LONG), NUM_TOKENS, salt="early"))


def test_prefixes_are_not_kept_and_it_is_said(pool: InstancePool) -> None:
    pair = pool.pair(*sides("mistral", "tp1", "tp1"))
    found = [ask_one(pair, greedy(prompt(LONG), 4)) for _ in range(2)]
    check_tokens(windowed("mistral"), [prompt(LONG)] * 2, found, 4)
    assert [each.traces["prefill"].num_cached for each in found] == [0, 0]
    assert [each.traces["decode"].num_held for each in found] == [0, 0]
    assert any("prefixes are not kept: pages before a window" in line for line in pair.decode.sizes.lines())
