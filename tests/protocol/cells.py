"""Cases for the cells of a machine's table, and a check that they leave nothing out.

A case says what one event does to one record: exactly which fields change, and exactly which effects follow.
`gaps` compares the cases of a machine with its table, both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import pytest

from baton.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from baton.protocol.machine import Cell, Ignored, Table

NOW = 100.0
Key = tuple[Enum, type]


@dataclass(frozen=True)
class Case:
    """One event at one record: the fields that change, `state` among them, and the effects, in order."""

    about: str
    record: Any
    event: object
    changes: Mapping[str, object] = field(default_factory=dict)
    effects: tuple[object, ...] = ()
    now: float = NOW

    @property
    def key(self) -> Key:
        return self.record.state, type(self.event)

    @property
    def to(self) -> Enum:
        return self.changes.get("state", self.record.state)  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{name_of(self.key)}: {self.about}"


@dataclass(frozen=True)
class Suite:
    """A machine with its cases, a record in every state, and an event of every type."""

    table: Table[Any]
    cases: tuple[Case, ...]
    records: Mapping[Enum, Any]
    events: Mapping[type, object]

    def missing(self) -> list[Key]:
        """The pairs of state and event that have no cell."""
        pairs = [(state, event) for state in self.table.states for event in self.table.events]
        return [pair for pair in pairs if pair not in self.table.cells]


def name_of(key: Key) -> str:
    return f"{key[0].value} x {key[1].__name__}"


def ignored(
    records: Mapping[Enum, Any], events: Mapping[type, object], state: Enum, *kinds: type
) -> tuple[Case, ...]:
    """Cases for events that mean nothing any more in a state."""
    return tuple(Case("nothing changes", records[state], events[kind]) for kind in kinds)


def check(table: Table[Any], case: Case) -> None:
    """The case holds, and what went in was not altered."""
    before, event = copy.deepcopy((case.record, case.event))
    after, effects = table.step(case.record, case.event, case.now)
    assert changes(before, after) == dict(case.changes)
    assert effects == case.effects
    assert (case.record, case.event) == (before, event), "an action altered what it was given"


def check_missing(suite: Suite, key: Key) -> None:
    """A missing cell raises on behalf of whoever caused the event, and nothing changes."""
    record, event = suite.records[key[0]], suite.events[key[1]]
    before = copy.deepcopy(record)
    with pytest.raises(ProtocolError, match=key[1].__name__) as raised:
        suite.table.step(record, event, NOW)
    wanted = RemoteProtocolError if key[1] in suite.table.remote else LocalProtocolError
    assert type(raised.value) is wanted
    assert key[0].value in str(raised.value)
    assert record == before


def changes(before: Any, after: Any) -> dict[str, object]:
    """The fields that differ, as they are afterwards."""
    names = getattr(before, "__struct_fields__", None) or [one.name for one in fields(before)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def gaps(suite: Suite) -> list[str]:
    """What the cases of a machine leave out, and what they say too much; empty if they are complete."""
    return [*_unfit(suite.table), *_unsampled(suite), *_uncovered(suite), *_unreached(suite), *_idle(suite)]


def _unfit(table: Table[Any]) -> Iterable[str]:
    for (state, event), entry in table.cells.items():
        if state not in table.states:
            yield f"{state} x {event.__name__}: not of this machine"
        for to in entry.to if isinstance(entry, Cell) else ():
            if to not in table.states:
                yield f"{name_of((state, event))}: leads to {to}, which is not of this machine"
    for event in table.remote - set(table.events):
        yield f"{event.__name__} is remote, but no event of this machine"


def _unsampled(suite: Suite) -> Iterable[str]:
    for state in suite.table.states:
        if getattr(suite.records.get(state), "state", None) is not state:
            yield f"no record in state {state.value}"
    for event in suite.table.events:
        if type(suite.events.get(event)) is not event:
            yield f"no event {event.__name__}"


def _uncovered(suite: Suite) -> Iterable[str]:
    covered = {case.key for case in suite.cases}
    for key in suite.table.cells.keys() - covered:
        yield f"{name_of(key)}: no case"
    for key in covered - suite.table.cells.keys():
        yield f"{name_of(key)}: a case, but no cell"


def _unreached(suite: Suite) -> Iterable[str]:
    reached = {(case.key, case.to) for case in suite.cases}
    for key, entry in suite.table.cells.items():
        for to in entry.to if isinstance(entry, Cell) else ():
            if (key, to) not in reached:
                yield f"{name_of(key)}: no case leads to {to.value}"


def _idle(suite: Suite) -> Iterable[str]:
    """A cell that says it acts has to do something in one case at least; else it is IGNORED."""
    acting = {case.key for case in suite.cases if case.changes or case.effects}
    for key, entry in suite.table.cells.items():
        if isinstance(entry, Cell) and key not in acting:
            yield f"{name_of(key)}: acts, but no case shows what it does"
        if isinstance(entry, Ignored) and key in acting:
            yield f"{name_of(key)}: is ignored, but a case says what it does"
