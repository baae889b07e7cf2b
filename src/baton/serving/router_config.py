"""The configuration of `baton route`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from baton.settings import Tls


class LocalMode(Enum):
    """Which prompts a decode instance prefills itself."""

    AUTO = "auto"
    """Those that finish sooner that way, by measured rates; and all while there is no prefill instance."""
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Every wait, retry and queue of the router has one of these bounds."""

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
    """A failure later than this after the request came, or after its last token, is not retried."""
    connect_s_max: float = 1.5
    silence_s_max: float = 10.0
    """An upstream request without progress is ended after this, if its instance answers no polls either."""
    first_s_max: float = 300.0
    """A response that has not begun after this is given up, whatever its instance says."""
    stall_s_max: float = 60.0
    """A response that has begun and not grown for this long is resumed elsewhere."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    registry: str
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    local: LocalMode = LocalMode.AUTO
    first_token: Literal["", "prefill", "decode"] = ""
    poll_s: float = 1.0
    limits: RouterLimits = field(default_factory=RouterLimits)
    tls: Tls | None = None
    """For HTTPS to clients, and towards instances and the registry."""
