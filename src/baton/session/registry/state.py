"""The state of a registry, without clock or socket: `now` is an argument in seconds.

An instance is held under one epoch at a time. A higher epoch displaces the lower one with all of its members
and transfers; a lower one is refused, also for a while after the last member of the higher one has left, so
that a process that was only asleep does not come back as the instance. Members of one epoch agree on
everything but their rank.

Transfers are counted by dp group and chosen for by that count alone. They belong to the epoch too: a later
incarnation of the instance knows nothing of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from baton.plan.layout import parse_layout
from baton.session.registry.messages import (
    TRANSFER_TTL_S,
    Assigned,
    AssignmentRequest,
    Change,
    ChangeKind,
    Member,
    Missing,
    Refusal,
    RegistryError,
    Roster,
    Topology,
    check_member,
    check_transfer,
)

EPOCH_KEPT_S = 3600.0
NUM_INSTANCES_MAX = 4096
NUM_MEMBERS_MAX = 131_072
NUM_TRANSFERS_MAX = 1_000_000

_SLACK = 64
"""Old entries of a heap that are not worth a sweep."""

Key = TypeVar("Key", bound=tuple[object, ...])

DEFAULT_REQUEST = AssignmentRequest(None, TRANSFER_TTL_S)


class Expiries(Generic[Key]):
    """Keys with a time each: a heap that skips old entries, and sweeps them when they are many."""

    def __init__(self) -> None:
        self._at: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._num_set = 0

    def set(self, key: Key, at: float) -> None:
        """The key is due at this time and at no other."""
        self._num_set += 1  # so that the heap never has to compare two keys
        self._at[key] = (at, self._num_set)
        heapq.heappush(self._heap, (at, self._num_set, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, number, key) for key, (at, number) in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """The key is not due any more, if it ever was."""
        self._at.pop(key, None)

    def pop_due(self, now: float) -> Iterator[Key]:
        """Takes out what is due, in order of time."""
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            yield key

    def next(self) -> float | None:
        """The earliest time, if there is any."""
        while self._heap:
            at, number, key = self._heap[0]
            if self._at.get(key) == (at, number):
                return at
            heapq.heappop(self._heap)
        return None


@dataclass(slots=True)
class RegisteredInstance:
    """One instance under its newest epoch; without members it is kept for its epoch and transfers alone."""

    epoch: int
    layout: str
    members: dict[int, Member] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)
    """The dp group of each."""
    loads: list[int] = field(default_factory=list)
    """Transfers of each dp group."""

    def missing(self) -> tuple[int, ...]:
        """Ranks of the layout that have not registered."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.members)

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout has."""
        return parse_layout(self.layout).num_ranks

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have registered; a rank outside of the layout cannot."""
        return len(self.members) == self.num_ranks


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a registry takes before it refuses more."""

    num_instances_max: int = NUM_INSTANCES_MAX
    num_members_max: int = NUM_MEMBERS_MAX
    num_transfers_max: int = NUM_TRANSFERS_MAX


MemberKey: TypeAlias = tuple[str, int]
TransferKey: TypeAlias = tuple[str, str]
NameKey: TypeAlias = tuple[str]


class RegistryState:
    """Members and transfers; changes of the topology wait in it until they are taken."""

    def __init__(self, boot: str, capacity: Capacity | None = None) -> None:
        self._boot = boot
        self._capacity = capacity or Capacity()
        self._instances: dict[str, RegisteredInstance] = {}
        self._num_changes = 0
        self._changes: list[Change] = []
        self._members: Expiries[MemberKey] = Expiries()
        self._transfers: Expiries[TransferKey] = Expiries()
        self._names: Expiries[NameKey] = Expiries()
        self._num_members = 0
        self._num_transfers = 0

    def register(self, member: Member, now: float) -> bool:
        """Registers or renews a member; answers whether it had not been known."""
        check_member(member)
        self.expire(now)
        held = self._instances.get(member.instance)
        if held is None or member.rank not in held.members:
            self._limit(self._num_members, self._capacity.num_members_max, "members")
        instance = self._instance_for(member)
        is_new = member.rank not in instance.members
        instance.members[member.rank] = member
        self._members.set((member.instance, member.rank), now + member.ttl_s)
        if is_new:
            self._num_members += 1
            self._names.drop((member.instance,))
            self._note(ChangeKind.REGISTERED, member)
        return is_new

    def unregister(self, instance: str, rank: int, epoch: int, now: float) -> bool:
        """Removes a member of this very epoch; answers whether there was one."""
        self.expire(now)
        held = self._instances.get(instance)
        if held is None or held.epoch != epoch or rank not in held.members:
            return False
        self._members.drop((instance, rank))
        self._remove(instance, rank, ChangeKind.UNREGISTERED, now)
        return True

    def assign(
        self, instance: str, transfer: str, now: float, request: AssignmentRequest = DEFAULT_REQUEST
    ) -> Assigned:
        """The dp group of a transfer: the recorded one, else the one wanted for, else the least loaded."""
        check_transfer(transfer)
        self.expire(now)
        held = self._instances.get(instance)
        dp = None if held is None else held.transfers.get(transfer)
        if held is None or (dp is None and not held.members):
            raise RegistryError(
                Refusal.UNKNOWN, f"instance {instance!r} is not registered; ask again when it has started"
            )
        if request.epoch not in (None, held.epoch):
            raise RegistryError(
                Refusal.CONFLICT,
                f"transfer {transfer!r} was meant for epoch {request.epoch} of instance {instance!r}, which "
                f"is at epoch {held.epoch}; give the attempt a new transfer id",
            )
        if dp is None:
            dp = self._choose(instance, held, request.dp)
            self._limit(self._num_transfers, self._capacity.num_transfers_max, "transfers")
            self._num_transfers += 1
            held.transfers[transfer] = dp
            held.loads[dp] += 1
        elif request.dp not in (None, dp):
            raise RegistryError(
                Refusal.CONFLICT,
                f"transfer {transfer!r} has dp group {dp} of instance {instance!r}, not {request.dp}; "
                f"take that one, or give the attempt a new transfer id",
            )
        self._transfers.set((instance, transfer), now + request.ttl_s)
        return Assigned(dp, held.epoch)

    def release(self, instance: str, transfer: str, now: float) -> bool:
        """Forgets a transfer; answers whether it was known."""
        self.expire(now)
        self._transfers.drop((instance, transfer))
        return self._forget(instance, transfer)

    def loads(self, instance: str, now: float) -> tuple[int, ...]:
        """Transfers in flight by dp group."""
        self.expire(now)
        held = self._instances.get(instance)
        return tuple(held.loads) if held is not None else ()

    def topology(self, now: float, instances: Iterable[str] | None = None) -> Topology:
        """Everything, or these instances, with what is missing of it."""
        self.expire(now)
        present = {name for name, held in self._instances.items() if held.members}
        wanted = sorted(present if instances is None else set(instances))
        rosters = tuple(self._roster(name) for name in wanted if name in present)
        missing = list(self._missing(wanted))
        if instances is None and not wanted:
            missing.append(Missing("", (), "no instance is registered"))
        return Topology(self._id(), rosters, tuple(missing))

    def expire(self, now: float) -> None:
        """Removes what was not renewed in time."""
        for name, rank in self._members.pop_due(now):
            self._remove(name, rank, ChangeKind.EXPIRED, now)
        for name, transfer in self._transfers.pop_due(now):
            self._forget(name, transfer)
        for (name,) in self._names.pop_due(now):
            for transfer in self._instances[name].transfers:
                self._transfers.drop((name, transfer))
            self._num_transfers -= len(self._instances.pop(name).transfers)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, at the latest."""
        times = (self._members.next(), self._transfers.next(), self._names.next())
        return min((time for time in times if time is not None), default=None)

    def take_changes(self) -> list[Change]:
        """The changes since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken

    def _instance_for(self, member: Member) -> RegisteredInstance:
        """The instance that a member may join, made or begun anew where it is the first of its epoch."""
        name, held = member.instance, self._instances.get(member.instance)
        if held is None:
            self._limit(len(self._instances), self._capacity.num_instances_max, "instances")
        elif member.epoch < held.epoch:
            raise RegistryError(
                Refusal.DISPLACED,
                f"epoch {member.epoch} of instance {name!r} is over: epoch {held.epoch} has registered; "
                f"end this process, or start the instance with a higher epoch",
            )
        elif member.epoch == held.epoch and held.members:
            _check_agreement(member, next(iter(held.members.values())))
            return held
        elif member.epoch == held.epoch and member.layout == held.layout:
            return held
        self._clear(name)
        groups = parse_layout(member.layout).size("dp")
        self._instances[name] = RegisteredInstance(member.epoch, member.layout, loads=[0] * groups)
        return self._instances[name]

    def _clear(self, name: str) -> None:
        """Ends an epoch: its members are displaced and its transfers forgotten."""
        held = self._instances.get(name)
        if held is None:
            return
        for transfer in list(held.transfers):
            self._transfers.drop((name, transfer))
            self._forget(name, transfer)
        for rank in sorted(held.members):
            self._members.drop((name, rank))
            member = held.members.pop(rank)
            self._num_members -= 1
            self._note(ChangeKind.DISPLACED, member)

    def _remove(self, name: str, rank: int, kind: ChangeKind, now: float) -> None:
        held = self._instances[name]
        member = held.members.pop(rank)
        self._num_members -= 1
        self._note(kind, member)
        if not held.members:
            self._names.set((name,), now + EPOCH_KEPT_S)

    def _forget(self, name: str, transfer: str) -> bool:
        held = self._instances.get(name)
        dp = None if held is None else held.transfers.pop(transfer, None)
        if held is None or dp is None:
            return False
        held.loads[dp] -= 1
        self._num_transfers -= 1
        return True

    def _choose(self, name: str, held: RegisteredInstance, wanted: int | None) -> int:
        if wanted is None:
            return min(range(len(held.loads)), key=lambda dp: (held.loads[dp], dp))
        if not 0 <= wanted < len(held.loads):
            raise RegistryError(
                Refusal.INVALID,
                f"dp must be 0 to {len(held.loads) - 1}, the dp groups of instance {name!r} "
                f"({held.layout}), or null; found {wanted}",
            )
        return wanted

    def _roster(self, name: str) -> Roster:
        held = self._instances[name]
        first = next(iter(held.members.values()))
        return Roster(
            instance=name,
            epoch=first.epoch,
            **first.shared,
            ranks=tuple(sorted(held.members)),
            loads=tuple(held.loads),
            is_complete=held.is_complete,
        )

    def _missing(self, wanted: Iterable[str]) -> Iterator[Missing]:
        for name in wanted:
            held = self._instances.get(name)
            if held is None or not held.members:
                yield Missing(name, (), "not registered")
            elif not held.is_complete:
                ranks = held.missing()
                yield Missing(name, ranks, f"{len(ranks)} of {held.num_ranks} ranks not registered")

    def _note(self, kind: ChangeKind, member: Member) -> None:
        held = self._instances[member.instance]
        is_complete = held.epoch == member.epoch and held.is_complete
        self._num_changes += 1
        self._changes.append(Change(self._id(), kind, member, is_complete))

    def _id(self) -> str:
        return f"{self._boot}-{self._num_changes}"

    def _limit(self, count: int, most: int, what: str) -> None:
        if count >= most:
            raise RegistryError(Refusal.FULL, f"the registry holds {most} {what}, its most; try again later")


def _check_agreement(member: Member, other: Member) -> None:
    mine, theirs = member.shared, other.shared
    for name, value in theirs.items():
        if mine[name] != value:
            raise RegistryError(
                Refusal.CONFLICT,
                f"{name} of rank {member.rank} is {_plain(mine[name])!r}, but rank {other.rank} registered "
                f"{_plain(value)!r} for epoch {member.epoch} of instance {member.instance!r}; "
                f"start all ranks alike, under a new epoch",
            )


def _plain(value: object) -> object:
    return getattr(value, "value", value)
