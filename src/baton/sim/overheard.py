"""What drivers log: an exception that they confined to one transfer is a finding all the same."""

from __future__ import annotations

import logging

LOGGER = "baton.session"
BENDING = frozenset({"duplication", "echo", "loss", "reordering"})
"""Faults after which a peer may seem to break the protocol."""


class Overheard(logging.Handler):
    """Keeps the first thing that should never have been logged."""

    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._may_seem_broken = bool(faults & BENDING)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it if it is the first."""
        is_broken = "broke" in record.msg or record.msg.startswith("session with")
        if self.text or (not record.exc_info and (not is_broken or self._may_seem_broken)):
            return
        self.text = logging.Formatter("%(message)s").format(record)

    def __enter__(self) -> Overheard:
        logging.getLogger(LOGGER).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
