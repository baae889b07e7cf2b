"""State machines as tables: `state x event -> state, effects`.

A record is a frozen Struct with a `state` field (machines copy records all the time, and a Struct is copied
ten times faster than a dataclass). Events are messages, or small dataclasses for what is not a message. A
table has a cell for a state and an event: `cell(act, *to)` names the action and the states it may lead to;
IGNORED is a cell of its own, for an event that may come late and means nothing any more. An event without a
cell raises and, since records are frozen and actions pure, changes nothing. Actions take (record, event, now)
and return (record, effects); they read no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.outcomes import Cause, Outcome

Record = TypeVar("Record", bound=Any)
Value = TypeVar("Value", bound=Any)
Effects: TypeAlias = tuple[object, ...]
Action: TypeAlias = Callable[[Any, Any, float], tuple[Any, Effects]]


def replace(value: Value, **changes: Any) -> Value:
    """A copy with other fields, for Structs and dataclasses alike."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)


@dataclass(frozen=True, slots=True)
class Cell:
    """What an event does in a state, and where that may lead."""

    act: Action
    to: tuple[Enum, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event changes nothing in this state."""


IGNORED = Ignored()
Entry: TypeAlias = Cell | Ignored


def cell(act: Action, *to: Enum) -> Cell:
    """A cell whose action leads to one of these states."""
    return Cell(act, to)


@dataclass(frozen=True)
class Table(Generic[Record]):
    """A machine: its name, states and cells. Events that the peer causes are listed as remote."""

    name: str
    states: type[Enum]
    remote: frozenset[type]
    cells: Mapping[tuple[Enum, type], Entry]

    @property
    def events(self) -> tuple[type, ...]:
        """Every event that has a cell."""
        return tuple(dict.fromkeys(event for _, event in self.cells))

    def step(self, record: Record, event: object, now: float) -> tuple[Record, Effects]:
        """The record after an event, and the effects that the driver has to perform."""
        entry = self.cells.get((record.state, type(event)))
        if entry is None:
            kind = RemoteProtocolError if type(event) in self.remote else LocalProtocolError
            raise kind(f"{self.name}: {type(event).__name__} has no place in state {record.state.value}")
        if isinstance(entry, Ignored):
            return record, ()
        after, effects = entry.act(record, event, now)
        assert after.state in entry.to, (
            f"{self.name}: {record.state} x {type(event).__name__} led to {after.state}"
        )
        return after, effects


# Events and effects that several machines have.


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The link to the other instance is gone, or was never made."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Conclude:
    """Report the outcome to the engine."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Forget:
    """The transfer or grant is over; the record may be dropped."""
