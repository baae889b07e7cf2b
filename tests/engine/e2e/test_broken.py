"""The comparison with `transformers` sees a hand-over that goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.e2e.breaking import compare
from tests.engine.e2e.broken_worker import BROKEN
from tests.engine.e2e.instances import InstancePool, Side, check_idle

from baton.engine.instance import Instance
from baton.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.long]

FAILS_CLOSED = {"skipped_group": None, "turned_bit": "checksum of .* differs"}


@pytest.fixture
def sound(pool: InstancePool, folder: Path) -> Instance:
    return pool.instance(Side(str(folder)))


def test_the_control_is_right(monkeypatch: pytest.MonkeyPatch, folder: Path, sound: Instance) -> None:
    compare(folder, sound, "nothing", monkeypatch)
    check_idle(sound)


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - {"nothing", *FAILS_CLOSED}))
def test_other_tokens(monkeypatch: pytest.MonkeyPatch, folder: Path, sound: Instance, name: str) -> None:
    with pytest.raises(AssertionError, match="answer 0: token"):
        compare(folder, sound, name, monkeypatch)
    check_idle(sound)


@pytest.mark.parametrize("name", FAILS_CLOSED)
def test_no_tokens(monkeypatch: pytest.MonkeyPatch, folder: Path, sound: Instance, name: str) -> None:
    with pytest.raises(EngineError, match=FAILS_CLOSED[name]):
        compare(folder, sound, name, monkeypatch)
    check_idle(sound)
