"""Tokens as they are named in log-probabilities."""

from __future__ import annotations

from baton.engine.commands import SampledToken
from baton.engine.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0
"""In place of minus infinity, which JSON does not have."""
_BROKEN = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """How vocabularies of bytes spell each byte as a letter that can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenNames:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def name(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, or its spelling where it has none, and its bytes where they are known."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def _find(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        text = self._tokenizer.decode([token])
        if text and _BROKEN not in text:
            return text, list(text.encode())
        spelling = self._tokenizer.spelling(token)
        byte = self._tokenizer.byte_of(token)
        if byte is not None:
            raw = bytes([byte])
        elif text and all(letter in _LETTERS for letter in spelling):
            raw = bytes(_LETTERS[letter] for letter in spelling)
        else:
            return spelling or f"token_id:{token}", list(spelling.encode()) or None
        # A part of a character has no text of its own.
        return "bytes:" + "".join(f"\\x{each:02x}" for each in raw), list(raw)


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LOGPROB_MIN)


def likeliest(sampled: SampledToken, num_top: int) -> list[tuple[int, float]]:
    """The tokens that were likeliest in a token's place, best first."""
    ranked = sorted(sampled.top.items(), key=lambda item: (-item[1], item[0]))
    return [(token, finite(logprob)) for token, logprob in ranked[:num_top]]
