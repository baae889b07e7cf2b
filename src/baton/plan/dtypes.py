"""Element types by the names that people type."""

from __future__ import annotations

from baton.errors import ConfigError

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of one element; fp8 is e4m3."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ConfigError(f"unknown dtype {dtype!r}; use one of {', '.join(ITEM_BYTES)}") from None
