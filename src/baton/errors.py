"""Every error that Baton raises on purpose; anything else that escapes is a bug.

BatonError
|-- ConfigError            an option, a model or a number that cannot be used
|-- LayoutError            a layout, or a pair of layouts, for which no hand-over exists
|-- PlanError              a finished plan that fails its independent check
|-- ProtocolError
|   |-- LocalProtocolError     this side misused the protocol
|   `-- RemoteProtocolError    the peer misbehaved
|-- RegistryError          the registry refused, or could not be reached (baton.session.registry)
|-- TransportError         bytes could not be moved
|-- ProcessError           a child process ended early, or did not answer
`-- EngineError            a model could not be loaded or run
    `-- FullError              too many requests wait already
"""

from __future__ import annotations


class BatonError(Exception):
    """The root: its text says what was wrong, with which value, and what to do."""


class ConfigError(BatonError):
    """An option, a model or a number that cannot be used."""


class LayoutError(BatonError):
    """A layout, or a pair of layouts, for which no hand-over exists."""

    def __init__(self, reason: str, *, component: str | None = None, sides: str | None = None) -> None:
        where = [f"component {component}" if component else "", sides or ""]
        prefix = ", ".join(part for part in where if part)
        super().__init__(f"{prefix}: {reason}" if prefix else reason)
        self.reason = reason
        self.component = component
        self.sides = sides


class PlanError(BatonError):
    """A finished plan that fails its independent check."""


class ProtocolError(BatonError):
    """The hand-over protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side misused the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer misbehaved."""


class TransportError(BatonError):
    """Bytes could not be moved."""


class ProcessError(BatonError):
    """A child process ended early, or did not answer."""


class ContextError(ConfigError):
    """A prompt and its answer do not fit into the context or the pool."""


class EngineError(BatonError):
    """A model could not be loaded or run."""


class FullError(EngineError):
    """Too many requests wait already; it is worth asking again in about so many seconds."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


LAST_WORDS = "; its last words: "
"""Between how a process ended and what it printed."""


def for_clients(text: str) -> str:
    """The reason of an end without what the process printed, which may name files and settings."""
    return text.partition(LAST_WORDS)[0]
