"""Slots of recurrent state: taken, used again, copied, given up; and that the comparison sees them wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.breaking import broken
from tests.engine.e2e.broken_states import BROKEN
from tests.engine.e2e.instances import (
    BothSides,
    InstancePool,
    Side,
    ask_all,
    ask_one,
    check_idle,
    end_of,
    greedy,
    until,
)
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.engine.hybrids import hybrid
from tests.engine.tiny import oracle

from baton.engine.deployment import Pair
from baton.engine.instance import Instance
from baton.engine.requests import RequestError, RequestFinished
from baton.errors import EngineError
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack
from baton.plan.ranges import to_ids

pytestmark = pytest.mark.engine

NUM_TOKENS = 24
CHUNK = 16
FAMILIES = ("qwen3_5_text", "falcon_h1")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return hybrid(request.param)


def side(folder: Path, name: str, **options: object) -> Side:
    return Side(str(folder), name=name).but(chunk_tokens=CHUNK, **options)


def test_it_is_said_that_prefixes_are_not_kept(folder: Path) -> None:
    lines = Instance(side(folder, "told").config).sizes.lines()
    assert any("prefixes are not kept: recurrent state" in line for line in lines)
    assert any("64 slots (state)" in line for line in lines)


def test_a_layers_state_leaves_with_its_last_chunk(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(side(folder, "by layer", policy="fixed:1"), side(folder, "second", state_slots=3))
    asked = prompt(2 * CHUNK + 8, "by layer")
    story = ask_one(pair, greedy(asked, 2)).traces["prefill"]
    config = json.loads((folder / "config.json").read_text())
    cache = stack((read_config(config, "tiny"),))
    wanted: dict[tuple[int, int], int] = {}
    for component, layer in ((each, layer) for each in cache.components for layer in to_ids(each.layers)):
        size = 4 * component.num_units * component.num_elements
        for step, num_tokens in enumerate((CHUNK, CHUNK, 8)):
            num_entries = num_tokens if component.extent.has_tokens else int(step == 2)
            wanted[step, layer] = wanted.get((step, layer), 0) + size * num_entries
    found: dict[tuple[int, int], int] = {}
    for copy in story.copies[0]:
        # Groups are offered as they are computed, layer after layer.
        at = divmod(copy.chunk, cache.num_layers)
        found[at] = found.get(at, 0) + copy.num_bytes
    assert found == {at: size for at, size in wanted.items() if size}


def test_fewer_slots_than_requests(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(side(folder, "first", state_slots=2), side(folder, "second", state_slots=3))
    asked = [prompt(length, f"slots {length}") for length in (1, 5, 18, 33, 7, 40, 21, 2)]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


def test_more_answers_than_slots(pool: InstancePool, folder: Path) -> None:
    where = pool.instance(side(folder, "second", state_slots=3))
    asked = [prompt(9, "fork one"), prompt(30, "fork two")]
    found = ask_all(where, [greedy(each, NUM_TOKENS, n=3) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    assert [len(each.tokens) for each in found] == [3, 3]
    check_idle(where)


def test_preempted_answers_are_the_same(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(
        side(folder, "first", state_slots=2), side(folder, "tight", pool_tokens=160, growth_tokens=0)
    )
    before = pair.decode.counts()["preempted"]
    asked = [prompt(length, f"tight {length}") for length in (20, 25, 30, 35)]
    found = ask_all(pair, [greedy(each, 40) for each in asked])
    check_tokens(folder, asked, found, 40)
    assert pair.decode.counts()["preempted"] > before
    check_idle(pair.prefill, pair.decode)


def test_aborts_at_random_moments(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(side(folder, "first", state_slots=2), side(folder, "second", state_slots=3))
    chance = random.Random(5)
    asked = [prompt(30 + index, "abort") for index in range(8)]
    handed = [BothSides(pair, greedy(each, NUM_TOKENS)) for each in asked]
    doomed = chance.sample(range(len(asked)), len(asked) // 2)
    for index in doomed:
        time.sleep(chance.random() * 0.05)  # a moment that nobody chose
        both = handed[index].sides
        for listener in chance.choice([both, both[:1], both[1:]]):
            listener.instance.core.abort(listener.number)
    for index, (each, answer) in enumerate(zip(handed, oracle(folder, asked, NUM_TOKENS), strict=True)):
        ends = [end_of(listener) for listener in each.sides]
        tokens = ends[1][0]
        assert tokens == answer[: len(tokens)]
        assert index in doomed or (
            tokens == answer and all(isinstance(end, RequestFinished) for _, end in ends)
        )
    check_idle(pair.prefill, pair.decode)


def test_a_killed_source_leaves_clean_slots(pool: InstancePool, folder: Path) -> None:
    # A slow link: states are under way when their source is lost.
    slow = replace(side(folder, "slow", link_bytes_per_s=5e3), layout="tp2")
    pair = pool.pair(slow, side(folder, "second", state_slots=3))
    handed = [BothSides(pair, greedy(prompt(40, f"kill {index}"), NUM_TOKENS)) for index in range(2)]
    until(lambda: any(not books.is_idle for books in pair.prefill.core.schedulers), "the prompts are begun")
    os.kill(pair.prefill.pids[1], signal.SIGKILL)
    assert all(isinstance(end_of(each.decode)[1], RequestError) for each in handed)
    pair.prefill.close()
    check_idle(pair.decode)
    asked = [prompt(length, "after") for length in (3, 20, 33)]
    found = ask_all(pair.decode, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)


def num_mapped(pid: int) -> int:
    """Pieces of shared memory that a process can write."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:")


def test_a_source_that_hangs_is_ended_before_its_pages_are_stuck(pool: InstancePool) -> None:
    # Two of three slots are in quarantine while the stopped rank lives: for long, and the target gives up.
    folder = hybrid("falcon_h1")
    slow = replace(side(folder, "slow", link_bytes_per_s=5e3), layout="tp2")
    pair = pool.pair(slow, side(folder, "second", state_slots=3))
    pid, other = (pair.prefill.pids[rank] for rank in (0, 1))
    before = num_mapped(pid)
    handed = [BothSides(pair, greedy(prompt(40, f"hang {index}"), NUM_TOKENS)) for index in range(2)]
    until(lambda: num_mapped(pid) > before, "the target's memory is mapped")
    os.kill(pid, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)
    pair.prefill.close()
    assert all(isinstance(end_of(each.decode)[1], RequestError) for each in handed)
    check_idle(pair.decode)
    assert pair.decode.is_running


@pytest.mark.long
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_seen(pool: InstancePool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hybrid("falcon_h1")
    sound = pool.instance(side(folder, "sound"))
    with broken(side(folder, f"broken {name}"), name, monkeypatch, "broken_states") as instance:
        pair = Pair(sound, instance) if name == "uncopied_state" else Pair(instance, sound)
        asked = [prompt(length, "broken") for length in (40, 19)]

        def compare() -> None:
            found = [ask_one(pair, greedy(each, NUM_TOKENS, n=2)) for each in asked]
            check_tokens(folder, asked, found, NUM_TOKENS)

        if name == "nothing":
            compare()
        else:
            with pytest.raises((AssertionError, EngineError)) as caught:
                compare()
            assert isinstance(caught.value, EngineError) or "token" in str(caught.value)
    check_idle(sound)
