"""The table's own rules, and the checks of tests/protocol/cells.py on machines that are broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import pytest
from tests.protocol.cells import Case, Suite, check, check_missing, gaps, ignored

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.machine import IGNORED, Table, cell, replace


class Door(Enum):
    SHUT = "shut"
    OPEN = "open"
    GONE = "gone"


class Bell(Enum):
    SILENT = "silent"


@dataclass(frozen=True)
class House:
    state: Door = Door.SHUT
    visits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pushed:
    """Somebody came."""

    who: str = "ann"


@dataclass(frozen=True)
class Pulled:
    """It was closed."""


@dataclass(frozen=True)
class Stormed:
    """The wind blew."""


@dataclass(frozen=True)
class Creak:
    """The hinges."""


def _push(one: House, event: Pushed, now: float):
    visits = {**one.visits, event.who: one.visits.get(event.who, 0) + 1}
    return replace(one, state=Door.OPEN, visits=visits), (Creak(),)


def _pull(one: House, event: Pulled, now: float):
    return replace(one, state=Door.GONE if now > 1000 else Door.SHUT), ()


def _push_in_place(one: House, event: Pushed, now: float):
    one.visits[event.who] = 1
    return replace(one, state=Door.OPEN, visits={event.who: 1}), (Creak(),)


CELLS = {
    (Door.SHUT, Pushed): cell(_push, Door.OPEN),
    (Door.SHUT, Stormed): IGNORED,
    (Door.OPEN, Pulled): cell(_pull, Door.SHUT, Door.GONE),
}
TABLE: Table[House] = Table("door", Door, frozenset({Stormed}), CELLS)
RECORDS = {state: House(state) for state in Door}
EVENTS = {Pushed: Pushed(), Pulled: Pulled(), Stormed: Stormed()}
CASES = (
    Case("in", RECORDS[Door.SHUT], Pushed(), {"state": Door.OPEN, "visits": {"ann": 1}}, (Creak(),)),
    Case("to", RECORDS[Door.OPEN], Pulled(), {"state": Door.SHUT}),
    Case("off its hinges", RECORDS[Door.OPEN], Pulled(), {"state": Door.GONE}, now=2000.0),
    *ignored(RECORDS, EVENTS, Door.SHUT, Stormed),
)
SUITE = Suite(TABLE, CASES, RECORDS, EVENTS)


def with_cells(cells, remote=TABLE.remote) -> Suite:
    return replace(SUITE, table=replace(TABLE, cells={**CELLS, **cells}, remote=remote))


def test_a_sound_suite_has_no_gaps():
    assert gaps(SUITE) == []
    for case in CASES:
        check(TABLE, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_left_out_is_found(case):
    suite = replace(SUITE, cases=tuple(other for other in CASES if other is not case))
    assert len(gaps(suite)) >= 1


@pytest.mark.parametrize(
    ("suite", "found"),
    [
        (with_cells({(Door.GONE, Pushed): cell(_push, Door.OPEN)}), "gone x Pushed: no case"),
        (with_cells({(Door.GONE, Pushed): IGNORED}), "gone x Pushed: no case"),
        (with_cells({(Door.SHUT, Pushed): cell(_push, Door.OPEN, Door.GONE)}), "no case leads to gone"),
        (with_cells({(Door.SHUT, Stormed): cell(_pull, Door.SHUT)}), "acts, but no case shows"),
        (with_cells({(Door.SHUT, Pushed): IGNORED}), "is ignored, but a case says"),
        (with_cells({(Bell.SILENT, Pushed): IGNORED}), "not of this machine"),
        (with_cells({(Door.SHUT, Creak): IGNORED}), "no event Creak"),
        (with_cells({(Door.OPEN, Pulled): cell(_pull, Bell.SILENT)}), "leads to Bell.SILENT"),
        (with_cells({}, remote=frozenset({Creak})), "Creak is remote"),
        (
            replace(SUITE, table=replace(TABLE, cells={(Door.OPEN, Pulled): CELLS[Door.OPEN, Pulled]})),
            "a case, but no cell",
        ),
        (replace(SUITE, records={**RECORDS, Door.GONE: House()}), "no record in state gone"),
        (replace(SUITE, events={Pushed: Pushed(), Pulled: Pulled()}), "no event Stormed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_table_is_found(suite: Suite, found: str):
    assert any(found in gap for gap in gaps(suite)), gaps(suite)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CASES[0], changes={"state": Door.OPEN}),
        replace(CASES[0], effects=()),
        replace(CASES[0], effects=(Creak(), Creak())),
        replace(CASES[1], changes={}),
        replace(CASES[1], now=2000.0),
    ],
)
def test_a_case_that_does_not_hold_fails(wrong: Case):
    with pytest.raises(AssertionError):
        check(TABLE, wrong)


def test_an_action_that_alters_its_record_fails():
    broken = replace(TABLE, cells={**CELLS, (Door.SHUT, Pushed): cell(_push_in_place, Door.OPEN)})
    with pytest.raises(AssertionError, match="altered"):
        check(broken, replace(CASES[0], record=House()))


def test_a_missing_cell_raises_for_whoever_caused_it():
    house = House(Door.OPEN, {"ann": 1})
    with pytest.raises(LocalProtocolError, match="door: Pushed has no place in state open"):
        TABLE.step(house, Pushed(), 0.0)
    with pytest.raises(RemoteProtocolError, match="door: Stormed has no place in state open"):
        TABLE.step(house, Stormed(), 0.0)
    assert house == House(Door.OPEN, {"ann": 1})
    assert (Door.OPEN, Pushed) in SUITE.missing()
    for key in SUITE.missing():
        check_missing(SUITE, key)


def test_a_missing_cell_that_is_filled_is_noticed():
    filled = with_cells({(Door.GONE, Stormed): IGNORED})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_missing(filled, (Door.GONE, Stormed))


def test_an_action_may_only_lead_where_its_cell_says():
    broken = replace(TABLE, cells={**CELLS, (Door.SHUT, Pushed): cell(_push, Door.GONE)})
    with pytest.raises(AssertionError, match=r"Door\.SHUT x Pushed led to Door\.OPEN"):
        broken.step(House(), Pushed(), 0.0)


def test_an_ignored_event_answers_the_very_record():
    house = House()
    after, effects = TABLE.step(house, Stormed(), 0.0)
    assert after is house
    assert effects == ()
