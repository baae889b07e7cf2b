"""A KV cache that an engine allocates with torch lies where the transport can reach it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.session.handoff_world import Side, Transfer, World, without_leaks, worlds

from baton.protocol.outcomes import Why
from baton.session.allocation import CacheAllocation, allocate_tensor
from baton.transport import Bytes, Transport, open_transport
from baton.transport.shm.target import SegmentRange


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


@pytest.fixture
def shm() -> Iterator[Any]:
    transport = open_transport("shm")
    yield transport
    transport.close()


def is_shared(transport: Any, tensor: torch.Tensor) -> bool:
    """Whether a source could map it."""
    region = transport.register(tensor)
    try:
        return isinstance(transport._locate(region.number), SegmentRange)
    finally:
        transport.unregister(region)


def allocate_like_vllm(num_bytes: int) -> dict[str, torch.Tensor]:
    """One allocation for all layers, and strided views of it."""
    backing = torch.zeros(num_bytes, dtype=torch.int8, device=torch.device("cpu"))
    blocks = backing.view(torch.bfloat16).view(2, -1)
    return {"layer.0": blocks[0], "layer.1": blocks[1]}


def test_a_cache_that_is_allocated_in_the_context_is_shared_memory(shm: Any) -> None:
    with CacheAllocation(shm) as allocation:
        caches = allocate_like_vllm(1 << 16)
    assert allocation.num_bytes == 1 << 16
    assert all(is_shared(shm, cache) for cache in caches.values())
    assert not any(cache.any() for cache in caches.values())
    caches["layer.1"].fill_(3.0)
    assert not caches["layer.0"].any()


def test_without_the_context_it_is_not(shm: Any) -> None:
    with CacheAllocation(shm):
        pass
    assert not is_shared(shm, torch.zeros(4096, dtype=torch.int8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 5),
        lambda: torch.zeros((3, 5), dtype=torch.float16),
        lambda: torch.empty(size=(2, 0, 4)),
        lambda: torch.empty(7, dtype=torch.uint8, device="cpu"),
        lambda: torch.zeros([], dtype=torch.int64),
        lambda: torch.zeros(4, requires_grad=True),
        lambda: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.ones(3),
    ],
    ids=["sizes", "shape", "empty", "bytes", "scalar", "gradient", "strides", "other device", "other call"],
)
def test_a_tensor_is_what_torch_would_have_made(shm: Any, make: Any) -> None:
    with CacheAllocation(shm):
        made = make()
    wanted = make()
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(made, name) == getattr(wanted, name), name
    assert made.stride() == wanted.stride()


def test_what_is_allocated_into_memory_of_the_caller_stays_there(shm: Any) -> None:
    own = torch.ones(4)
    with CacheAllocation(shm) as allocation:
        assert torch.zeros(4, out=own) is own
    assert not own.any()
    assert allocation.num_bytes == 0


def test_memory_lives_as_long_as_a_view_of_it(shm: Any) -> None:
    view = allocate_tensor(shm, 4096)[:16].view(torch.float32)
    gc.collect()
    assert len(shm.segments) == 1
    assert not view.any()
    del view
    gc.collect()
    assert not shm.segments


def hand_off(allocate: Any) -> Transfer:
    """A transfer over shm into pools that an engine allocated."""

    def wrap(rank: int, transport: Transport) -> Transport:
        own = transport.allocate

        def allocate_pool(num_bytes: int) -> Bytes:
            return np.asarray(allocate(SimpleNamespace(allocate=own), num_bytes).numpy()).view(np.uint8)

        transport.allocate = allocate_pool  # type: ignore[method-assign]
        return transport

    with worlds(Side("tp2"), Side("pp2", wrap=wrap), transport="shm") as world:
        return transferred(world)


def transferred(world: World) -> Transfer:
    transfer = world.transfer()
    transfer.receive()
    transfer.send()
    transfer.offer_all()
    transfer.commit()
    transfer.outcome()
    return transfer


def by_torch(transport: Any, num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.int8)


def in_context(transport: Any, num_bytes: int) -> torch.Tensor:
    with CacheAllocation(transport):
        return by_torch(transport, num_bytes)


def test_a_cache_is_handed_over_into_what_torch_allocated() -> None:
    num_bytes, num_right = hand_off(in_context).compare()
    assert num_right == num_bytes > 0


def test_a_cache_in_private_memory_is_refused() -> None:
    cause = hand_off(by_torch).cause()
    assert cause.why is Why.COPY_FAILED
    assert "is not in shared memory" in cause.text
