"""Production code changed for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.machine import Cell, Table


@contextmanager
def patched(owner: Any, **changes: Any) -> Iterator[None]:
    """Sets attributes of a module or a class."""
    before = {name: owner.__dict__[name] for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def acting(table: Table[Any], state: Any, event: type, act: Any, *to: Any) -> Iterator[None]:
    """Has a cell of a table act otherwise, and perhaps lead elsewhere too."""
    cells: Any = table.cells
    before = cells[state, event]
    cells[state, event] = Cell(act, (*before.to, *to))
    try:
        yield
    finally:
        cells[state, event] = before
