"""Prefill in one layout, decode in another, over every transport: the tokens of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.e2e.instances import InstancePool, Side, ask_all, ask_one, check_idle, greedy
from tests.engine.e2e.prompts import LENGTHS, check_tokens, prompt
from tests.engine.tiny import tiny

pytestmark = pytest.mark.engine

GQA, MLA = "llama", "deepseek_v3"
SIX_HEADS = {"num_key_value_heads": 6}


@dataclass(frozen=True)
class Crossing:
    """Two layouts and what lies between them."""

    prefill: str
    decode: str
    transport: str = "shm"
    pages: tuple[int, int] = (16, 16)
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the checkpoint's config."""

    def __str__(self) -> str:
        pages = "" if self.pages[0] == self.pages[1] else f" page {self.pages[0]} to {self.pages[1]}"
        return f"{self.prefill} to {self.decode} {self.transport}{pages}"


def crossings(uneven: str) -> list[Crossing]:
    """Ordered so that neighbours share instances."""
    return [
        Crossing("tp1", "tp1"),
        Crossing("tp1", "tp1", pages=(16, 64)),
        Crossing("tp1", "tp1", pages=(64, 16)),
        Crossing("cp2:mirror", "tp1"),
        Crossing("cp2:split", "tp1"),
        Crossing("tp1", "cp2:stripe1"),
        Crossing("pp2", "tp1"),
        Crossing(uneven, "pp2"),
        Crossing("tp2", "tp4"),
        Crossing("cp2", "tp2"),
        Crossing("tp2", "cp2:split"),
        Crossing("tp3", "tp2", changes=SIX_HEADS),
        Crossing("pp2.cp2.tp2", "dp2.tp2"),
        Crossing("tp2", "tp1", "tcp"),
        Crossing("tp1", "tp2", "tcp"),
        Crossing("dp2.tp1", "tp2", "tcp"),
        Crossing("tp2", "dp2.tp1", "tcp"),
        Crossing("tp2", "tp1", "mooncake"),
        Crossing("tp1", "pp2", "mooncake"),
        Crossing("pp2", "tp2", "mooncake"),
        Crossing("tp2", "tp1", "nixl"),
        Crossing("tp1", "pp2", "nixl"),
        Crossing("pp2", "tp2", "nixl"),
    ]


CASES = [(GQA, each) for each in crossings("pp3:1-3-1")] + [(MLA, each) for each in crossings("pp3:1-2-1")]


def sides(folder: Path, crossing: Crossing) -> tuple[Side, Side]:
    plain = Side(str(folder)).but(transport=crossing.transport, chunk_tokens=100)
    first = replace(plain, layout=crossing.prefill).but(page_tokens=crossing.pages[0])
    second = replace(plain, layout=crossing.decode).but(page_tokens=crossing.pages[1])
    return first, second if second != first else replace(second, name="two")


@pytest.mark.parametrize(("family", "crossing"), CASES, ids=[f"{family}: {each}" for family, each in CASES])
def test_tokens(pool: InstancePool, family: str, crossing: Crossing) -> None:
    folder = tiny(family, **crossing.changes)
    pair = pool.pair(*sides(folder, crossing))
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, 64, salt=str(crossing)) for each in asked])
    check_tokens(folder, asked, found)
    longer = [*asked[-1], *prompt(7, "tail")]
    again = ask_one(pair, greedy(longer, 32, salt=str(crossing)))
    check_tokens(folder, [longer], [again], 32)
    check_hit(crossing.prefill, again.traces["prefill"].num_cached)
    check_hit(crossing.decode, again.traces["decode"].num_held)
    check_idle(pair.prefill, pair.decode)


def check_hit(layout: str, num_found: int) -> None:
    """A prefix was found, where the layout keeps them and the request went to the group that has it."""
    if "dp" not in layout:
        assert (num_found > 0) == ("split" not in layout)
