"""A worker process in which something of recurrent state is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from baton.engine import worker
from baton.engine.attention import states
from baton.engine.attention.pools import CachePools
from baton.engine.attention.states import Alike
from baton.plan import chunks
from baton.plan.cache import Component
from baton.plan.ranges import Range
from baton.plan.routes import Chunk, Plan, Prompt


def nothing() -> None:
    """The control: as it is."""


def early_state() -> None:
    """A state leaves with the first chunk of a prompt, not with its last."""
    right = chunks.entries_in

    def entries_in(plan: Plan, component: Component, prompt: Prompt, chunk: Chunk) -> Range:
        if component.extent.has_tokens:
            return right(plan, component, prompt, chunk)
        return (0, 1) if chunk.tokens[0] == 0 else (0, 0)

    chunks.entries_in = entries_in


def used_slot() -> None:
    """A sequence begins with what the slot's last owner left."""
    find = states._alike

    def found(*args: Any) -> list[Alike]:
        return [replace(each, begun=None) for each in find(*args)]

    states._alike = found


def uncopied_state() -> None:
    """An answer that forks off gets no copy of the state."""
    copy = CachePools.copy_pages
    CachePools.copy_pages = lambda self, copies: copy(
        self, [each for each in copies if each.group != "state"]
    )


BROKEN: Mapping[str, Callable[[], None]] = {
    each.__name__: each for each in (nothing, early_state, used_slot, uncopied_state)
}


def main(connection: Connection, name: str) -> None:
    """Runs a worker that is broken by name."""
    BROKEN[name]()
    worker.main(connection)
