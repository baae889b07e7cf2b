"""Whose turn it is where sources wait for grants, and targets for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.books.sequence import Role, Sequence, State

if TYPE_CHECKING:
    from baton.engine.books.scheduler import Scheduler


def is_ungranted(sequence: Sequence) -> bool:
    """Whether a source's sequence has no pages at its target yet."""
    return sequence.role is Role.SOURCE and not sequence.is_granted


def has_half(books: Scheduler, sequence: Sequence) -> bool:
    """Whether a source without a grant may begin: such hold half of the pool, or are a single one."""
    holders = [
        one for one in books.sequences.values() if is_ungranted(one) and one.state is not State.WAITING
    ]
    if not holders:
        return True
    for group, pool in books.room.pools.items():
        need = books.shares.num_pages(group, sequence.num_prompt, sequence.num_prompt)
        if need + sum(len(one.holding.held(group)) for one in holders) > pool.num_pages // 2:
            return False
    return True


def is_older_waiting(books: Scheduler, sequence: Sequence) -> bool:
    """Whether an older sequence waits for pages that a reservation would take."""
    for one in books.waiting:
        if one.age > sequence.age:
            return False
        if is_ungranted(one) and not has_half(books, one):
            continue
        return any(
            books.shares.num_pages(group, one.num_tokens, one.num_prompt)
            + books.shares.num_pages(group, sequence.num_prompt, sequence.num_prompt)
            > books.room.num_available(group)
            for group in books.room.pools
        )
    return False
