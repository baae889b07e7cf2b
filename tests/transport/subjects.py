"""What the contract is run on: every transport in the package, and wrappers around some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.ports import free_port
from tests.transport.faulty import Faulty, FaultyConfig
from tests.transport.host_ipc import HostIpc

from baton.errors import ConfigError
from baton.transport import Batch, Place, Transport, open_transport, transport_names
from baton.transport.library import LibraryTransport
from baton.transport.mooncake import is_built_for_cuda
from baton.transport.shm import ShmConfig, ShmTransport
from baton.transport.throttled import throttle


class StagedShm(ShmTransport):
    """shm with every batch through the ring, in small slots, from host memory to host memory."""

    def __init__(self, config: ShmConfig) -> None:
        super().__init__(config)
        self.staging = replace(self.staging, is_needed=lambda batch: True)

    def can_stream_wait(self, batch: Batch) -> bool:
        return True


def open_staged(**options: Any) -> Transport:
    return StagedShm(ShmConfig(**{"slot_bytes": 1 << 20, "num_slots": 4, **options}))


def open_throttled(name: str, **options: Any) -> Transport:
    return throttle(open_transport(name, **options), bytes_per_s=10e9, latency_s=20e-6)


def open_faulty(name: str, **options: Any) -> Transport:
    """The wrapper without faults."""
    return Faulty(open_transport(name, **options), FaultyConfig())


def open_on_cuda(name: str, **options: Any) -> Transport:
    """A library with device memory at both ends."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU")
    if name == "mooncake" and not is_built_for_cuda():
        raise ConfigError("this Mooncake is built without CUDA")
    transport = open_transport(name, **options)
    assert isinstance(transport, LibraryTransport)
    transport.capabilities = replace(transport.capabilities, places=frozenset({Place.CUDA}))
    return transport


SUBJECTS: dict[str, Callable[..., Transport]] = {
    **{name: partial(open_transport, name) for name in transport_names()},
    "shm-staged": open_staged,
    "cuda_ipc-host": HostIpc,
    **{f"{name}-cuda": partial(open_on_cuda, name) for name in ("mooncake", "nixl")},
    **{f"throttled-{name}": partial(open_throttled, name) for name in ("memory", "shm", "tcp")},
    **{f"faulty-{name}": partial(open_faulty, name) for name in ("memory", "shm", "tcp")},
}


def restart_options(subject: str) -> dict[str, Any]:
    """Options under which a second target gets the addresses of the first."""
    if not any(name in subject for name in ("tcp", "mooncake", "nixl")):
        return {}
    return {"port": free_port()}
