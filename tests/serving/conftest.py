"""One running server for all tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.serving.live import Live, live


@pytest.fixture(scope="package")
def served() -> Iterator[Live]:
    """A server of the tiny model; whoever uses it leaves it idle."""
    with live() as found:
        yield found
