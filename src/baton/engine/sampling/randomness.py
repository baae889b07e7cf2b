"""Randomness without state, so that any instance can go on with any answer."""

from __future__ import annotations

import hashlib
import struct

_MASK = 2**64 - 1
_MANTISSA_BITS = 53


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of answer `index`; the same on any machine."""
    mixed = hashlib.blake2b(struct.pack("<QQQ", seed & _MASK, index, position), digest_size=8)
    bits = int.from_bytes(mixed.digest(), "little")
    # The 53 bits that a float64 holds exactly: rounding up to 1 is ruled out.
    return float((bits >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS)
