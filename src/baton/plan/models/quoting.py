"""Values of a user in messages of one line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN_MAX = 80


def shown(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` where a known name is close, or nothing."""
    close = get_close_matches(name[:SHOWN_MAX], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
