"""Whether what came in for a grant is what the plan expects.

Each function enters one word of the source into the account and answers the new one, the same object if the
word was heard before. What cannot be true raises RemoteProtocolError with the reason: a chunk outside of the
prompt or over another, a rank that has no part, a manifest that is not the plan's, or a rank that committed
and left a gap. Words may come in any order, so a gap counts only when all of a rank's chunks are there.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import RemoteProtocolError
from baton.protocol.arrival import Account, Terms, UnpackAt
from baton.protocol.ledger import Rectangle
from baton.protocol.machine import replace
from baton.protocol.messages import Commit, Landed


def enter_landed(account: Account, terms: Terms, landed: Landed) -> tuple[Account, tuple[UnpackAt, ...]]:
    """The account with a chunk more, and what has to be unpacked or checked before it counts."""
    source, key = landed.source_rank, (landed.source_rank, landed.chunk)
    box = Rectangle(landed.layers, landed.tokens)
    if key in account.chunks:
        if account.chunks[key] != box:
            raise RemoteProtocolError(f"chunk {landed.chunk} of rank {source} came twice, and differs")
        return account, ()
    _check_part(terms, source)
    ledger, at_work, work = account.ledger, account.at_work, []
    for target in terms.targets.get(source, ()):
        entered = ledger.entered((source, target), box)
        # Whether a chunk that matters to a pair holds something for it, and so whether what the source says
        # of it can be, the target rank finds out itself.
        if (source, target) in terms.worked and entered is not ledger:
            at_work |= {(source, target, landed.chunk)}
            work.append(UnpackAt(target, landed))
        else:
            ledger = entered
    after = replace(account, chunks={**account.chunks, key: box}, ledger=ledger, at_work=at_work)
    _check_gaps(after)
    return after, tuple(work)


def enter_unpacked(account: Account, pair: tuple[int, int], chunk: int) -> Account:
    """The account with a chunk where it belongs."""
    key = (*pair, chunk)
    if key not in account.at_work:
        return account
    ledger = account.ledger.entered(pair, account.chunks[pair[0], chunk])
    after = replace(account, ledger=ledger, at_work=account.at_work - {key})
    _check_gaps(after)
    return after


def enter_commit(account: Account, terms: Terms, commit: Commit) -> Account:
    """The account with a source rank's manifest."""
    source = commit.source_rank
    if source in account.commits:
        if account.commits[source] != commit:
            raise RemoteProtocolError(f"rank {source} committed twice, and differs")
        return account
    _check_part(terms, source)
    said = _counted(commit.num_bytes)
    due = _counted({target: counts for (rank, target), counts in terms.expected.items() if rank == source})
    if said != due:
        raise RemoteProtocolError(f"rank {source} says it sent {said}, the plan expects {due}")
    after = replace(account, commits={**account.commits, source: commit})
    _check_gaps(after)
    return after


def is_complete(account: Account, terms: Terms) -> bool:
    """Whether everything is there, each thing once, and where it belongs."""
    return (
        account.aux is not None
        and account.ledger.is_full
        and not account.at_work
        and account.commits.keys() >= terms.sources
        and all(_num_seen(account, rank) == one.num_chunks for rank, one in account.commits.items())
    )


def _check_part(terms: Terms, source: int) -> None:
    if source not in terms.sources:
        raise RemoteProtocolError(f"rank {source} has no part in this transfer")


def _check_gaps(account: Account) -> None:
    for source, commit in account.commits.items():
        num_seen = _num_seen(account, source)
        if num_seen > commit.num_chunks:
            raise RemoteProtocolError(f"rank {source} committed {commit.num_chunks} chunks, {num_seen} came")
        is_at_work = any(rank == source for rank, _, _ in account.at_work)
        if num_seen == commit.num_chunks and not is_at_work and (lacks := account.ledger.lacks(source)):
            raise RemoteProtocolError(f"rank {source} committed, but pairs {lacks} lack something")


def _num_seen(account: Account, source: int) -> int:
    return sum(1 for rank, _ in account.chunks if rank == source)


def _counted(num_bytes: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Without what is nothing, so that saying nothing and saying zero are the same."""
    found = {
        target: {name: count for name, count in counts.items() if count}
        for target, counts in num_bytes.items()
    }
    return {target: counts for target, counts in found.items() if counts}
