"""Sizes as people write them."""

from __future__ import annotations

import pytest

from baton.bench.sizes import parse_sizes, size_text
from baton.errors import ConfigError


def test_sizes() -> None:
    assert parse_sizes("4KiBx256, 1Bx1,16MiBx32") == [(4096, 256), (1, 1), (16 << 20, 32)]
    assert [size_text(*size) for size in parse_sizes("4KiBx256,1Bx1,3MiBx2")] == [
        "4KiBx256",
        "1Bx1",
        "3MiBx2",
    ]


@pytest.mark.parametrize("text", ["", "4KiB", "4KBx2", "0KiBx2", "4KiBx0", "4KiBx2,", "9GiBx1", "-4KiBx1"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_sizes(text)
