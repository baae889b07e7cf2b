"""Where the host is ahead of what it computes, as on a GPU: hand-overs begin later and groups wait."""

from __future__ import annotations

import pytest
from tests.engine.e2e.breaking import broken
from tests.engine.e2e.instances import Side, ask_all, ask_one, check_idle, greedy, opened
from tests.engine.e2e.prompts import LENGTHS, PAGE, check_tokens, prompt
from tests.engine.tiny import tiny

from baton.engine.deployment import Pair

pytestmark = pytest.mark.engine

NUM_TOKENS = 24


@pytest.mark.parametrize("name", ["hurried", "unhurried"])
@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [("llama", "tp1", "tp2"), ("llama", "pp2", "tp1"), ("deepseek_v3", "cp2", "tp1")],
)
def test_tokens(family: str, prefill: str, decode: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(family)
    asked = [prompt(length) for length in LENGTHS]
    longer = [*asked[-1], *prompt(PAGE + 3, "tail")]
    plain = Side(str(folder)).but(chunk_tokens=100, policy="fixed:1")
    source = Side(str(folder), prefill, "late").but(chunk_tokens=100, policy="fixed:1")
    with opened() as pool, broken(source, name, monkeypatch, "late_worker") as late:
        sound = pool.instance(Side(plain.model, decode, "sound", plain.options))
        pair = Pair(late, sound)
        for salt in ("first", "second"):
            found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=salt) for each in asked])
            check_tokens(folder, asked, found, NUM_TOKENS)
        again = ask_one(pair, greedy(longer, NUM_TOKENS, salt="second"))
        check_tokens(folder, [longer], [again], NUM_TOKENS)
        story = again.traces["prefill"]
        assert story.num_cached
        assert not story.unpipelined
        assert all(len({copy.chunk for copy in copies}) > 1 for copies in story.copies.values())
        check_idle(late, sound)
