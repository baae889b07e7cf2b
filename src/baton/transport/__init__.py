"""Transports that move spans between registered buffers, one module each; base.py has their contract."""

from __future__ import annotations

import importlib
import pkgutil
import select
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any, get_type_hints

from baton.errors import ConfigError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Bytes,
    Capabilities,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Invitation,
    Peer,
    Place,
    Ranges,
    Reach,
    Region,
    RemoteRegion,
    RevokedQuiet,
    RevokedUnknown,
    RevokeResult,
    Ticket,
    Transport,
)
from baton.transport.fences import NOW, CudaFence, HostFence

__all__ = [
    "DEADLINE_S",
    "NOW",
    "Batch",
    "Bytes",
    "Capabilities",
    "Completion",
    "CudaFence",
    "Description",
    "Done",
    "FailedQuiet",
    "FailedUnknown",
    "Fence",
    "HostFence",
    "Invitation",
    "Peer",
    "Place",
    "Ranges",
    "Reach",
    "Region",
    "RemoteRegion",
    "RevokeResult",
    "RevokedQuiet",
    "RevokedUnknown",
    "Ticket",
    "Transport",
    "capabilities_of",
    "check_library",
    "open_transport",
    "option_names",
    "parse_transport",
    "transport_names",
    "wait_for_events",
]

SHARED = frozenset({"base", "common", "fences", "library", "packing", "throttled"})
"""Modules of this package that are not transports."""


def open_transport(name: str, **options: Any) -> Transport:
    """Opens the transport of this name; the options are the fields of its config."""
    module, _ = _module(name)
    transport: Transport = module.TRANSPORT(_make_config(name, options))
    return transport


def option_names(name: str) -> list[str]:
    """The fields of a transport's config."""
    return list(_module(name)[1])


def _module(name: str) -> tuple[ModuleType, dict[str, type]]:
    """The module of a transport, and the types of its options; raises ConfigError on another name."""
    if name not in transport_names():
        raise ConfigError(f"transport {name!r} is not known; use {', '.join(transport_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    hints = get_type_hints(module.CONFIG)
    return module, {field.name: hints[field.name] for field in fields(module.CONFIG)}


def _make_config(name: str, options: Mapping[str, Any]) -> Any:
    module, types = _module(name)
    for option in options:
        if option not in types:
            names = ", ".join(types) or "none"
            raise ConfigError(f"transport {name!r} has no option {option!r}; it has {names}")
    return module.CONFIG(**options)


def capabilities_of(name: str) -> Capabilities:
    """What a transport can do, without opening it."""
    capabilities: Capabilities = importlib.import_module(f"{__name__}.{name}").TRANSPORT.capabilities
    return capabilities


def check_library(name: str) -> None:
    """Raises ConfigError if the library that a transport works through is not installed."""
    module = importlib.import_module(f"{__name__}.{name}")
    if hasattr(module, "check_library"):
        module.check_library()


def parse_transport(text: str) -> tuple[str, dict[str, Any]]:
    """`nixl:ucx=TLS=tcp` is nixl with one option; semicolons separate options.

    Raises ConfigError on a transport, an option or a value that cannot be.
    """
    name, _, rest = text.partition(":")
    types, options = _module(name)[1], dict[str, Any]()
    for part in rest.split(";") if rest else []:
        key, sign, value = part.partition("=")
        if not sign:
            raise ConfigError(f"transport {text!r}: write options as NAME=VALUE, joined by semicolons")
        options[key] = value
        if types.get(key) is int:
            try:
                options[key] = int(value)
            except ValueError:
                raise ConfigError(f"transport {text!r}: {key} is {value!r}; give a whole number") from None
    _make_config(name, options)
    return name, options


@cache
def transport_names() -> tuple[str, ...]:
    """Every module of this package except the shared ones."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    return tuple(sorted(names - SHARED))


def wait_for_events(transport: Transport, timeout_s: float) -> list[Completion]:
    """The result of `poll`, after waiting until a batch has ended or the time is up."""
    events = transport.poll()
    if events:
        return events
    poller = select.poll()
    poller.register(transport.fileno(), select.POLLIN)
    poller.poll(timeout_s * 1000)
    return transport.poll()
