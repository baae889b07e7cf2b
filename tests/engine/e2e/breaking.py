"""Instances whose ranks are broken on purpose, and whether the comparison with the oracle sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.e2e.instances import Side, ask_all, greedy
from tests.engine.e2e.prompts import check_tokens, prompt

from baton.engine import executor
from baton.engine.deployment import Pair
from baton.engine.instance import Instance

ROOT = Path(__file__).parents[3]
AT_TARGET = ("target_pages", "turned_bit")
NUM_TOKENS = 24


def broken(side: Side, name: str, patch: pytest.MonkeyPatch, module: str = "broken_worker") -> Instance:
    """An instance of which every rank runs with something wrong, by its name in a module of this folder."""
    with patch.context() as only:
        only.setattr(executor, "WORKER", (f"{__package__}.{module}", name))
        only.setenv("PYTHONPATH", str(ROOT))
        return Instance(side.config).start()


def compare(folder: Path, sound: Instance, name: str, patch: pytest.MonkeyPatch) -> None:
    """Asks a pair with one broken side and compares with the oracle, which may raise."""
    side = Side(str(folder), name=f"broken {name}").but(policy="fixed:1", is_verified=name == "turned_bit")
    with broken(side, name, patch) as instance:
        pair = Pair(sound, instance) if name in AT_TARGET else Pair(instance, sound)
        asked = [prompt(length, "broken") for length in (40, 100)]
        found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=name) for each in asked])
        check_tokens(folder, asked, found, NUM_TOKENS)
