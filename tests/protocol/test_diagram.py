"""The pictures and tables of docs/protocol.md are those of the machines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.protocol.test_machine import CELLS, TABLE, Door, Pulled, _pull
from tools.protocol_page import BEGIN, END, TABLES, diagram, document, grid, rewritten

from baton.errors import ConfigError
from baton.protocol.machine import Cell, cell, replace
from baton.protocol.messages import Message
from baton.protocol.source_rank import SOURCE_RANK

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TOOL = Path(__file__).parents[2] / "tools" / "protocol_page.py"

DIAGRAM = """\
stateDiagram-v2
    [*] --> shut
    shut --> open : Pushed
    open --> shut : Pulled
    open --> gone : Pulled
    gone --> [*]"""
GRID = """\
| event | | shut | open | gone |
| --- | --- | --- | --- | --- |
| Pushed | Somebody came. | open | | |
| *Stormed* | The wind blew. | - | | |
| Pulled | It was closed. | | shut, gone | |"""


def test_the_page_is_fresh():
    page = PAGE.read_text("utf-8")
    assert page == rewritten(page), "stale: run `make docs`"


def test_the_tool_rewrites_a_page(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    subprocess.run([sys.executable, str(TOOL), str(page)], check=True, timeout=300)
    assert page.read_text() == f"before\n{BEGIN}\n\n{document()}\n\n{END}\nafter\n"


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_page_without_a_place_for_it_is_refused(page: str):
    with pytest.raises(ConfigError, match="no place"):
        rewritten(page)


def test_a_small_machine_is_drawn():
    assert diagram(TABLE) == DIAGRAM


def test_a_small_machine_as_a_grid():
    assert grid(TABLE) == GRID


def test_a_changed_machine_changes_the_page():
    """The check of freshness can tell: every cell shows."""
    other = replace(TABLE, cells={**CELLS, (Door.GONE, Pulled): cell(_pull, Door.SHUT)})
    assert diagram(other) != diagram(TABLE)
    assert grid(other) != grid(TABLE)
    for key in SOURCE_RANK.cells:
        fewer = replace(
            SOURCE_RANK, cells={one: entry for one, entry in SOURCE_RANK.cells.items() if one != key}
        )
        assert grid(fewer) != grid(SOURCE_RANK), key


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_arrow_is_a_cell_and_every_cell_an_arrow(table):
    drawn = set()
    for state, to, events in re.findall(r"^    (\w+) --> (\w+) : (\S+)$", diagram(table), re.MULTILINE):
        drawn |= {(state, event, to) for event in events.split("<br/>")}
    wanted = {
        (state.value, event.__name__, to.value)
        for (state, event), entry in table.cells.items()
        if isinstance(entry, Cell)
        for to in entry.to
    }
    assert drawn == wanted


def test_every_message_is_explained():
    page = PAGE.read_text("utf-8")
    section = page.partition("## Messages")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section)) - {"needs"}
    assert named == {message.__name__ for message in Message.__subclasses__()}
