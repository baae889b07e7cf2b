"""What happened, one aligned row per event, byte for byte the same on every replay."""

from __future__ import annotations

import hashlib


class Trace:
    """Rows of (time, node, event, transfer, detail), kept only when somebody wants them."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.rows: list[str] = []

    def add(self, time_s: float, node: str, event: str, transfer: str = "", detail: str = "") -> None:
        """One row more."""
        if self.is_on:
            row = f"{time_s * 1000:12.4f}  {node:<10} {event:<16} {transfer:<8} {detail}"
            self.rows.append(row.rstrip())

    def digest(self) -> str:
        """A hash of all rows."""
        return hashlib.sha256("\n".join(self.rows).encode()).hexdigest()
