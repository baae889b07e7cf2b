"""Sizes as people write them: `64KiBx256` is 256 spans of 64 KiB."""

from __future__ import annotations

import re

from baton.errors import ConfigError

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BATCH_BYTES_MAX = 2 << 30
_SIZE = re.compile(r"([1-9][0-9]{0,9})(B|KiB|MiB|GiB)x([1-9][0-9]{0,6})")


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """(bytes of a span, spans) for each of a comma-separated list."""
    found = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"size {part!r} cannot be read; write sizes like 4KiBx256,64KiBx256")
        span_bytes, num_spans = int(match[1]) * UNITS[match[2]], int(match[3])
        if span_bytes * num_spans > BATCH_BYTES_MAX:
            raise ConfigError(
                f"size {part!r} is more than {BATCH_BYTES_MAX >> 30} GiB in one batch; use less"
            )
        found.append((span_bytes, num_spans))
    return found


def size_text(span_bytes: int, num_spans: int) -> str:
    """The opposite of `parse_sizes`, for one."""
    for unit in ("GiB", "MiB", "KiB"):
        if span_bytes % UNITS[unit] == 0:
            return f"{span_bytes // UNITS[unit]}{unit}x{num_spans}"
    return f"{span_bytes}Bx{num_spans}"
