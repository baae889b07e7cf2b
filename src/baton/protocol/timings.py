"""How long things may take; every machine gets these with its record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. A transfer has two deadlines: one from its last progress, one in all."""

    beat_s: float = 0.25
    """How often a link says that it lives."""
    silence_s: float = 3.0
    """How long a link may be silent before its other end counts as lost."""
    offer_s: float = 120.0
    """How long one side waits for a transfer that the other has not spoken of."""
    progress_s: float = 30.0
    total_s: float = 600.0
    copy_s: float = 5.0
    """How long one copy may go without progress."""
    ask_again_s: float = 0.25
    """How often an unanswered question (quiet? settled? still?) is put again, at first; it backs off."""
    ask_again_s_max: float = 4.0
    stuck_s: float = 10.0
    """How long pages may be in quarantine before they count as stuck: quiet takes a moment to be said."""
    redial_s: float = 0.1
    redial_s_max: float = 5.0
    look_up_s: float = 5.0
    """How long a source is looked for: a registry that was started anew hears of it in a moment."""
    linger_s: float = 60.0
    """How long the outcome of a transfer is remembered for a peer that has not heard of it."""
