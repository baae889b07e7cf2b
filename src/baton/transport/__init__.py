"""Ways to move spans between registered buffers, one module each, all under the contract in base.py."""

from __future__ import annotations

import importlib
import pkgutil
import select
from dataclasses import fields
from functools import cache
from typing import Any

from baton.errors import ConfigError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Bytes,
    Capabilities,
    Completion,
    Counters,
    Description,
    Done,
    Event,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Invitation,
    Landed,
    Peer,
    Place,
    Quiet,
    Ranges,
    Reach,
    Region,
    RemoteRegion,
    Stillness,
    Ticket,
    Transport,
    Unknown,
)
from baton.transport.fences import NOW, HostFence
from baton.transport.parts.cuda_fences import CudaFence

__all__ = [
    "DEADLINE_S",
    "NOW",
    "Batch",
    "Bytes",
    "Capabilities",
    "Completion",
    "Counters",
    "CudaFence",
    "Description",
    "Done",
    "Event",
    "FailedQuiet",
    "FailedUnknown",
    "Fence",
    "HostFence",
    "Invitation",
    "Landed",
    "Peer",
    "Place",
    "Quiet",
    "Ranges",
    "Reach",
    "Region",
    "RemoteRegion",
    "Stillness",
    "Ticket",
    "Transport",
    "Unknown",
    "open_transport",
    "option_names",
    "parse_transport",
    "transport_names",
    "wait_for_events",
]

SHARED = frozenset({"base", "fences", "packing", "parts", "wrappers"})
"""What is in this package and is no transport."""


def open_transport(name: str, **options: Any) -> Transport:
    """The transport of this name, with options of its config."""
    known = option_names(name)
    module = importlib.import_module(f"{__name__}.{name}")
    for option in options:
        if option not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(f"transport '{name}' has no option '{option}'; it has {names}")
    transport: Transport = module.TRANSPORT(module.CONFIG(**options))
    return transport


def option_names(name: str) -> list[str]:
    """What a transport of this name can be told."""
    if name not in transport_names():
        raise ConfigError(f"transport '{name}' is not known; write one of {', '.join(transport_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    return [field.name for field in fields(module.CONFIG)]


def parse_transport(text: str) -> tuple[str, dict[str, str]]:
    """`nixl:ucx=TLS=tcp` is nixl with an option of its config; options are joined by semicolons."""
    name, _, rest = text.partition(":")
    options = {}
    for part in rest.split(";") if rest else []:
        key, sign, value = part.partition("=")
        if not sign:
            raise ConfigError(f"transport {text!r}: write options as NAME=VALUE, joined by semicolons")
        options[key] = value
    return name, options


@cache
def transport_names() -> tuple[str, ...]:
    """The transports there are: every module here but the shared ones."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in SHARED))


def wait_for_events(transport: Transport, timeout_s: float) -> list[Event]:
    """What `poll` says, after sleeping until it says something or the time is up."""
    events = transport.poll()
    if events:
        return events
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    poller.poll(timeout_s * 1000)
    return transport.poll()
