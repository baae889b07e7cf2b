"""Every family gives the tokens of `transformers`, on one instance and handed over, cached or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.e2e.instances import InstancePool, Side, ask_all, ask_one, check_idle, greedy
from tests.engine.e2e.prompts import LENGTHS, NUM_TOKENS, PAGE, check_tokens, prompt
from tests.engine.tiny import FAMILIES, tiny

from baton.checkpoint.demo import fetch_demo
from baton.checkpoint.names import DEMO
from baton.errors import ConfigError

pytestmark = pytest.mark.engine

LONG = 300
NUM_WHOLE = LONG // PAGE * PAGE
SMALL_CHUNK = 40
"""No divisor of the long prompt, and no multiple of the page."""


@pytest.fixture(scope="module", params=[*FAMILIES, DEMO])
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param != DEMO:
        return tiny(request.param)
    try:
        return fetch_demo()
    except ConfigError as error:
        pytest.skip(f"demo: {error}")


def skip_demo(folder: Path) -> None:
    """A real model takes long for each prompt alone."""
    if folder.suffix == ".gguf":
        pytest.skip("demo: the same prompts are asked together")


def num_mixed(folder: Path) -> int:
    """How many tokens to ask for: a real model, and `transformers` with it, take long for each."""
    return NUM_TOKENS // 4 if folder.suffix == ".gguf" else NUM_TOKENS


@pytest.fixture
def prefill(folder: Path) -> Side:
    return Side(str(folder), name="prefill")


@pytest.fixture
def chunking(prefill: Side) -> Side:
    return prefill.but(chunk_tokens=SMALL_CHUNK)


@pytest.fixture
def decode(folder: Path) -> Side:
    return Side(str(folder), name="decode")


@pytest.mark.parametrize("length", LENGTHS)
def test_undisaggregated_alone(pool: InstancePool, folder: Path, decode: Side, length: int) -> None:
    skip_demo(folder)
    asked = prompt(length)
    heard = ask_one(pool.instance(decode), greedy(asked, NUM_TOKENS, salt="alone"))
    check_tokens(folder, [asked], [heard])
    assert heard.traces["both"].num_cached == 0


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_undisaggregated_mixed(
    pool: InstancePool, folder: Path, prefill: Side, chunking: Side, is_chunked: bool
) -> None:
    if is_chunked:
        skip_demo(folder)
    where = pool.instance(chunking if is_chunked else prefill)
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(where, [greedy(each, num_mixed(folder), salt="mixed") for each in asked])
    check_tokens(folder, asked, found, num_mixed(folder))
    num_groups = sum(map(len, found[-1].traces["both"].groups.values()))
    assert num_groups == 1 or (is_chunked and num_groups >= LONG // SMALL_CHUNK)


@pytest.mark.parametrize("length", LENGTHS)
def test_disaggregated_alone(
    pool: InstancePool, folder: Path, prefill: Side, decode: Side, length: int
) -> None:
    skip_demo(folder)
    asked = prompt(length)
    heard = ask_one(pool.pair(prefill, decode), greedy(asked, NUM_TOKENS, salt="pair alone"))
    check_tokens(folder, [asked], [heard])
    assert {role: (story.num_cached, story.num_held) for role, story in heard.traces.items()} == {
        "prefill": (0, 0),
        "decode": (0, 0),
    }
    assert sum(map(len, heard.traces["prefill"].copies.values())) > 0


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_disaggregated_mixed(
    pool: InstancePool, folder: Path, prefill: Side, decode: Side, is_chunked: bool
) -> None:
    pair = pool.pair(prefill.but(chunk_tokens=SMALL_CHUNK) if is_chunked else prefill, decode)
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, num_mixed(folder), salt=f"mixed {is_chunked}") for each in asked])
    check_tokens(folder, asked, found, num_mixed(folder))
    check_idle(pair.prefill, pair.decode)


def test_undisaggregated_after_a_hit(pool: InstancePool, folder: Path, chunking: Side) -> None:
    skip_demo(folder)
    where = pool.instance(chunking)
    asked = prompt(LONG)
    longer = [*asked, *prompt(PAGE + 3, "tail")]
    found = [ask_one(where, greedy(each, NUM_TOKENS, salt="hit")) for each in (asked, asked, longer)]
    check_tokens(folder, [asked, asked, longer], found)
    assert [each.traces["both"].num_cached for each in found] == [0, NUM_WHOLE, NUM_WHOLE]


@pytest.mark.parametrize("warm", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_disaggregated_after_a_hit(
    pool: InstancePool, folder: Path, chunking: Side, decode: Side, warm: tuple[bool, bool]
) -> None:
    skip_demo(folder)
    pair = pool.pair(chunking, decode)
    at_source, at_target = warm
    salt = f"hits {warm}"
    asked = prompt(LONG)
    longer = [*asked, *prompt(PAGE + 3, "tail")]
    if at_source:
        ask_one(pair.prefill, greedy(asked, 1, salt=salt))
    if at_target:
        ask_one(pair.decode, greedy(asked, 1, salt=salt))
    found = [ask_one(pair, greedy(each, NUM_TOKENS, salt=salt)) for each in (asked, longer)]
    check_tokens(folder, [asked, longer], found)
    hits = [(each.traces["prefill"].num_cached, each.traces["decode"].num_held) for each in found]
    assert hits == [(NUM_WHOLE * at_source, NUM_WHOLE * at_target), (NUM_WHOLE, NUM_WHOLE)]
    assert found[0].traces["decode"].num_cached == NUM_WHOLE * at_source
    check_idle(pair.prefill, pair.decode)
