"""Element types by the names that people type, and their conversion by numpy.

The conversion rounds to nearest even; it is slow and plain, a reference for what devices do.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of one element; fp8 is e4m3."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ConfigError(f"unknown dtype {dtype!r}; use one of {', '.join(ITEM_BYTES)}") from None


def convert(raw: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """The bytes of `raw` read as one dtype and written as another."""
    if source == target:
        return raw
    # Overflows become infinities; some processors report signalling NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        return _written(_read(raw, source), target)


def _read(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    match dtype:
        case "fp32":
            return raw.view(np.float32)
        case "fp16":
            return raw.view(np.float16).astype(np.float32)
        case "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case _:
            return _fp8_values()[raw]


def _written(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    match dtype:
        case "fp32":
            return values.view(np.uint8)
        case "fp16":
            return values.astype(np.float16).view(np.uint8)
        case "bf16":
            return _encode_bf16(values).view(np.uint8)
        case _:
            return _encode_fp8(values)


def _encode_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding must not carry a NaN's payload into an infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@cache
def _fp8_values() -> NDArray[np.float32]:
    """e4m3 without infinities: the value of every byte."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    small = mantissa * 2.0**-9
    values = np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


def _encode_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest e4m3 value, ties to the even code, saturating at 448."""
    positive = _fp8_values()[:127].astype(np.float64)
    size = np.minimum(np.abs(values.astype(np.float64)), positive[-1])
    above = np.clip(np.searchsorted(positive, size), 1, 126)
    below = above - 1
    to_below, to_above = size - positive[below], positive[above] - size
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(takes_above, above, below)
    codes = np.where(np.isnan(values), 127, codes)
    return (codes | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
