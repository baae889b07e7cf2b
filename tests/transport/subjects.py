"""What the contract is run on: every transport in the package, and every wrapper around one of them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.transport.staged import open_staged

from baton.transport import Transport, open_transport, transport_names
from baton.transport.wrappers import wrap

SUBJECTS: dict[str, Callable[..., Transport]] = {
    name: partial(open_transport, name) for name in transport_names()
}
SUBJECTS["shm-staged"] = open_staged

WRAPPED: dict[str, dict[str, Any]] = {"throttled": {"bytes_per_s": 10e9, "latency_s": 20e-6}, "faulty": {}}


def open_wrapped(wrapper: str, name: str, **options: Any) -> Transport:
    """A wrapper that changes nothing but time, around a transport."""
    return wrap(wrapper, open_transport(name, **options), **WRAPPED[wrapper])


SUBJECTS |= {
    f"{wrapper}-{name}": partial(open_wrapped, wrapper, name)
    for wrapper in WRAPPED
    for name in ("memory", "shm", "tcp")
}


def restart_options(subject: str) -> dict[str, Any]:
    """Options under which a second target gets the addresses of the first."""
    if not any(name in subject for name in ("tcp", "mooncake", "nixl")):
        return {}
    with socket.create_server(("127.0.0.1", 0)) as found:
        return {"port": found.getsockname()[1]}
