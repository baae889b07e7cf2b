"""An engine's KV cache in memory that a transport can reach, without a copy.

A source on the same host maps the target's pages, so shm needs them in memory that its transport allocated.
An engine allocates its cache with torch, which lets nobody replace its allocator of host memory: pluggable
allocators and memory pools are for devices. But torch passes the calls of a thread to a mode of that thread
(`torch.overrides.TorchFunctionMode`), and `CacheAllocation` is one: inside of it `torch.zeros` and
`torch.empty` of host memory take theirs from the transport. Nothing of torch is patched, and outside of the
context nothing changes. Calls for other devices, for pinned memory or into `out` pass through.

Mapping shared memory over what torch has allocated already would need no context. It is not done: the first
and the last page of an allocation hold the allocator's own data and its neighbours, which other threads write
meanwhile.

Import it by name: torch takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from baton.transport import Transport

FACTORIES = frozenset({torch.zeros, torch.empty})


def allocate_tensor(transport: Transport, num_bytes: int) -> torch.Tensor:
    """Zeroed bytes on the host that peers of a transport can reach once they are registered."""
    return torch.from_numpy(transport.allocate(num_bytes))


class CacheAllocation(TorchFunctionMode):
    """A context in which the host tensors that this thread makes lie in memory of a transport.

    Enter it around the code that allocates the KV cache and nothing else: each tensor gets memory pages of
    its own, which a child that is forked later does not inherit.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport
        self.num_bytes = 0
        """Allocated so far; 0 after the context means that the engine allocates in another way."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Makes the tensor of a factory's call, or passes the call on."""
        kwargs = kwargs or {}
        if func not in FACTORIES or kwargs.get("out") is not None or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if torch.device(torch.get_default_device() if device is None else device).type != "cpu":
            return func(*args, **kwargs)
        # What was asked for, without memory of its own.
        shape = func(*args, **{**kwargs, "device": "meta"})
        if not shape.nbytes or shape.layout is not torch.strided or not shape.is_contiguous():
            return func(*args, **kwargs)
        raw = allocate_tensor(self.transport, shape.nbytes)
        self.num_bytes += shape.nbytes
        return raw.view(shape.dtype).view(shape.shape).requires_grad_(shape.requires_grad)
