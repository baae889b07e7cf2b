"""Leases of staging: never two of one byte, never lost, first fit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import ConfigError, LocalProtocolError
from baton.session.memory import ALIGNMENT, Staging, StagingLease

NUM_BYTES = 10_000


class Leasing(RuleBasedStateMachine):
    """Random leases and returns, held against a map of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(NUM_BYTES)
        self.out: list[StagingLease] = []
        self.owners = [-1] * NUM_BYTES

    @rule(num_bytes=st.one_of(st.integers(1, 900), st.integers(1, NUM_BYTES + 600)))
    def take(self, num_bytes: int) -> None:
        fits = [at for at in range(0, NUM_BYTES, ALIGNMENT) if self.is_free(at, num_bytes)]
        lease = self.staging.lease(num_bytes)
        if not fits:
            assert lease is None
            return
        assert lease is not None
        assert (lease.offset, lease.num_bytes) == (fits[0], num_bytes)
        self.owners[lease.offset : lease.offset + num_bytes] = [lease.number] * num_bytes
        self.out.append(lease)

    def is_free(self, at: int, num_bytes: int) -> bool:
        return at + num_bytes <= NUM_BYTES and set(self.owners[at : at + num_bytes]) == {-1}

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.staging.give_back(lease)
        self.owners[lease.offset : lease.offset + lease.num_bytes] = [-1] * lease.num_bytes
        with pytest.raises(LocalProtocolError, match="not in use"):
            self.staging.give_back(lease)

    @invariant()
    def counts_agree(self) -> None:
        self.staging.check_integrity()
        rounded = sum(-(-lease.num_bytes // ALIGNMENT) * ALIGNMENT for lease in self.out)
        assert self.staging.leased_bytes == rounded
        assert self.staging.free_bytes == max(0, NUM_BYTES - rounded)


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=max(1, settings().max_examples // 8), stateful_step_count=30)


def test_a_range_that_was_leased_again_is_not_the_old_lease() -> None:
    staging = Staging(1024)
    old = staging.lease(1000)
    assert old is not None
    staging.give_back(old)
    new = staging.lease(1000)
    assert new is not None
    assert (new.offset, new.num_bytes) == (old.offset, old.num_bytes)
    with pytest.raises(LocalProtocolError):
        staging.give_back(old)
    staging.give_back(new)
    assert staging.free_bytes == 1024


def test_quarantined_bytes_are_not_given_out() -> None:
    staging = Staging(1024)
    kept = staging.lease(300)
    assert kept is not None
    assert staging.lease(600) is None
    rest = staging.lease(512)
    assert rest is not None
    assert rest.offset == 512
    assert staging.lease(1) is None
    assert staging.free_bytes == 0


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(ConfigError):
        Staging(-1)
    assert Staging(0).lease(1) is None
    for num_bytes in (0, -1):
        with pytest.raises(LocalProtocolError):
            Staging(10).lease(num_bytes)


def test_integrity_sees_a_lease_that_overlaps() -> None:
    staging = Staging(1024)
    for broken in (
        [StagingLease(0, 300, 0), StagingLease(256, 10, 1)],
        [StagingLease(8, 1, 0)],
        [StagingLease(0, 2000, 0)],
        [StagingLease(0, 1, 7)],
    ):
        staging._leases, staging._num_made = broken, 2
        with pytest.raises(AssertionError):
            staging.check_integrity()
