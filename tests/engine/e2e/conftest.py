from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.e2e.instances import InstancePool, opened
from tests.engine.tiny import tiny


@pytest.fixture(scope="module")
def pool() -> Iterator[InstancePool]:
    """Instances that the tests of a file share."""
    with opened() as instances:
        yield instances


@pytest.fixture(scope="module")
def folder() -> Path:
    """A tiny checkpoint; files with several models have a fixture of their own."""
    return tiny("llama")
