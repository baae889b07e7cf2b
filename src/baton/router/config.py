"""What a router is told, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class LocalMode(Enum):
    """Which prompts a decode instance prefills itself."""

    AUTO = "auto"
    """Those that are answered sooner so, by measured rates; and all while nobody else can."""
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Limits:
    """Nothing here waits, tries or keeps without one of these."""

    num_in_flight_max: int = 256
    """Requests that one instance is given at a time."""
    num_waiting_max: int = 1024
    """Requests that wait in the router until an instance has room."""
    wait_s_max: float = 30.0
    recover_s_max: float = 1.0
    """How long a request waits for an instance to appear where none is able."""
    num_attempts_max: int = 4
    """In a row, without a token in between."""
    num_resumes_max: int = 16
    retry_s_max: float = 30.0
    """A failure later than this after the request came, or after its last token, is not tried again."""
    connect_s_max: float = 1.5
    silence_s_max: float = 10.0
    """A leg without progress is ended after this, if its instance does not answer polls either."""
    first_s_max: float = 300.0
    """An answer that has not begun after this is given up, whatever its instance says."""
    stall_s_max: float = 60.0
    """An answer that has begun and not grown for this long is continued elsewhere."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One per thing that a user sets."""

    registry: str
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    local: LocalMode = LocalMode.AUTO
    first_token: Literal["", "prefill", "decode"] = ""
    poll_s: float = 1.0
    limits: Limits = field(default_factory=Limits)
