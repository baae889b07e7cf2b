"""The state of a registry, without clock or socket: `now` is an argument in seconds.

An instance is held under one epoch at a time. A higher epoch displaces the lower one with all of its members;
a lower one is refused, also for a while after the last member of the higher one has left, so
that a process that was only asleep does not come back as the instance. Members of one epoch agree on
everything but their rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from baton.plan.layout import parse_layout
from baton.session.registry.messages import (
    Change,
    ChangeKind,
    Member,
    Missing,
    Refusal,
    RegistryError,
    Roster,
    Topology,
    check_member,
)

EPOCH_KEPT_S = 3600.0
NUM_INSTANCES_MAX = 4096
NUM_MEMBERS_MAX = 131_072

_SLACK = 64
"""Old entries of a heap that are not worth a sweep."""

Key = TypeVar("Key", bound=tuple[object, ...])


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
    """One instance under its newest epoch; without members it is kept for its epoch alone."""

    epoch: int
    layout: str
    members: dict[int, Member] = field(default_factory=dict)

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


MemberKey: TypeAlias = tuple[str, int]
NameKey: TypeAlias = tuple[str]


class RegistryState:
    """Members by instance; changes of the topology wait in it until they are taken."""

    def __init__(self, boot: str, capacity: Capacity | None = None) -> None:
        self._boot = boot
        self._capacity = capacity or Capacity()
        self._instances: dict[str, RegisteredInstance] = {}
        self._num_changes = 0
        self._changes: list[Change] = []
        self._members: Expiries[MemberKey] = Expiries()
        self._names: Expiries[NameKey] = Expiries()
        self._num_members = 0

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
        for (name,) in self._names.pop_due(now):
            del self._instances[name]

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, at the latest."""
        times = (self._members.next(), self._names.next())
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
        self._clear(name)
        self._instances[name] = RegisteredInstance(member.epoch, member.layout)
        return self._instances[name]

    def _clear(self, name: str) -> None:
        """Ends an epoch: its members are displaced."""
        held = self._instances.get(name)
        if held is None:
            return
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

    def _roster(self, name: str) -> Roster:
        held = self._instances[name]
        first = next(iter(held.members.values()))
        return Roster(
            instance=name,
            epoch=first.epoch,
            **first.shared,
            ranks=tuple(sorted(held.members)),
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

    def _limit(self, count: int, most: int, entries: str) -> None:
        if count >= most:
            raise RegistryError(
                Refusal.FULL, f"the registry holds {most} {entries}, its most; try again later"
            )


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
