"""What a defect consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A defect, where to look for it, and who has to notice."""

    text: str
    broken: Callable[[], AbstractContextManager[None]]
    checkers: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What is set in the options of every seed, so that the defect has a chance to show."""
    scenario: str = ""
    """A story in which it shows, in place of random seeds."""
    num_tries: int = 60
