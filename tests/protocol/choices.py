"""Many small random decisions out of one string of bytes.

A property test draws the bytes in one go, which is far cheaper than a draw per decision, and a failure still
shrinks: towards zeros, which pick the first of everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices:
    """Decisions, one byte each; zeros when the bytes are used up."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._bytes: Iterator[int] = iter(raw)

    def __repr__(self) -> str:
        return f"Choices(bytes.fromhex({self.raw.rstrip(bytes(1)).hex()!r}))"

    def below(self, count: int) -> int:
        """A number from 0 to count - 1; count is at most 256."""
        return next(self._bytes, 0) % count

    def between(self, first: int, last: int) -> int:
        """A number from first to last."""
        return first + self.below(last - first + 1)

    def one_in(self, count: int) -> bool:
        """True once in a while; zeros say no."""
        return self.below(count) == count - 1

    def pick(self, found: Sequence[T]) -> T:
        """One of several."""
        return found[self.below(len(found))]

    def some(self, found: Sequence[T]) -> list[T]:
        """Each of several with even chances."""
        return [one for one in found if self.one_in(2)]

    def shuffled(self, found: Sequence[T]) -> list[T]:
        """All of several, in some order."""
        left, taken = list(found), []
        while left:
            taken.append(left.pop(self.below(len(left))))
        return taken


def choices(num_bytes: int) -> st.SearchStrategy[Choices]:
    """Decisions for one example."""
    return st.binary(min_size=num_bytes, max_size=num_bytes).map(Choices)
