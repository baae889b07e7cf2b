"""Numbers with units, as people write them on a command line."""

from __future__ import annotations

import re

from baton.errors import ConfigError

_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T)?(B|b)(?:/s|ps)")
_SCALES = {None: 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_speed(text: str) -> float:
    """Bytes per second of `12.5GB/s` or `100Gb/s`."""
    match = _SPEED.fullmatch(text.strip())
    speed = float(match[1]) * _SCALES[match[2]] / (8 if match[3] == "b" else 1) if match else 0.0
    if not speed > 0:
        raise ConfigError(f"link speed {text!r} cannot be read; write it like 12.5GB/s or 100Gb/s")
    return speed
