"""How context parallelism deals tokens over ranks: three schemes behind one interface.

A share is a part of the tokens; `num_shares` of them partition any prompt. Where there is one share, every
rank of the axis holds all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baton.plan.tokens import Stride


@dataclass(frozen=True, slots=True)
class Mirror:
    """Every rank holds every token."""

    def num_shares(self, num_ranks: int) -> int:
        """One: all ranks hold the same."""
        del num_ranks
        return 1

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """All tokens."""
        del index, num_ranks, page_tokens
        return Stride(0, num_tokens)


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous runs of whole pages, sizes a page apart at most, earlier ranks getting the extra."""

    def num_shares(self, num_ranks: int) -> int:
        """One run per rank."""
        return num_ranks

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """The run of one rank; empty where there are fewer pages than ranks."""
        num_pages = -(-num_tokens // page_tokens)
        base, extra = divmod(num_pages, num_ranks)
        first = index * base + min(index, extra)
        last = first + base + (index < extra)
        return Stride(min(first * page_tokens, num_tokens), min(last * page_tokens, num_tokens))


@dataclass(frozen=True, slots=True)
class Stripe:
    """Tokens dealt round robin in blocks; a block of 0 stands for the side's page."""

    block: int

    def num_shares(self, num_ranks: int) -> int:
        """One stripe per rank."""
        return num_ranks

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """The stripe of one rank: owner(t) = (t // block) mod ranks."""
        block = self.block or page_tokens
        return Stride(0, num_tokens, index * block, block, num_ranks * block)


Scheme: TypeAlias = Mirror | Split | Stripe
