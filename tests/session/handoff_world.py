"""Two instances of real endpoints in one process, and transfers between them that are compared byte by byte.

The pools of a target begin with noise. After a transfer every element that the prompt needed has to be right,
and every byte that no transfer was granted has to be as it was. Who holds which element is taken from
`tests.plan.world`, which knows nothing of the planner.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tests.plan.world import Held, holdings, make_cache, needed, put, raw_values

from baton.plan import Cache, Prompt, Spec, Storage, parse_layout
from baton.plan.dtypes import convert, item_bytes
from baton.plan.kinds import Paged
from baton.plan.ownership import buffers, page_spaces
from baton.plan.steps import ALWAYS_PACK, NEVER_PACK
from baton.plan.storage import HND, Order
from baton.protocol.outcomes import Aux, Cause, Failed, Outcome, Ready
from baton.protocol.timings import Timings
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import Handle, Receiving, Request, Sending, Waiting, prompt_digest
from baton.session.links import SocketConfig
from baton.session.loop import DriverPorts
from baton.session.process import TransportConfig
from baton.session.remote import EndpointProcess, RemoteEndpoint
from baton.sim.families import draw_placements
from baton.transport import Transport, open_transport

PATIENCE_S = 60.0
"""How long a test waits for what has to come; never for what must not."""
SECRET = b"a secret of these tests, 32 bytes"
TIMINGS = Timings(beat_s=0.02, silence_s=10 * PATIENCE_S, ask_again_s=0.02, redial_s=0.01, redial_s_max=0.05)
PATIENT = replace(TIMINGS, progress_s=1e5, total_s=1e5)
"""Without a deadline that a test could reach."""
AUX = Aux(tokens=(11,), logprobs=({11: -0.5},), cached_tokens=3, fields={"seed": 7})
NHD: Order = ("layer", "page", "token", "unit")
CACHE = make_cache(4, (Paged(4, 3, 2), ((0, 4),)))
"""Grouped-query attention: 4 layers, 4 heads, keys of 3 and values of 2 channels."""


class Clock:
    """Of the sessions in this process: a test that waits for a deadline of minutes puts it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        for owner, name in ((DriverPorts, "now"), (asyncio.BaseEventLoop, "time")):
            monkeypatch.setattr(owner, name, lambda _: time.monotonic() + self._ahead_s)

    def advance(self, duration_s: float) -> None:
        self._ahead_s += duration_s

    def end_by_deadline(self, handle: Handle, deadline_s: float) -> None:
        """What a peer says of progress that was made before may come late, and begin the deadline anew."""
        for _ in range(10):
            self.advance(deadline_s + 1.0)
            if handle.wait(PATIENCE_S / 10) != Waiting():
                return


@dataclass(frozen=True)
class Side:
    """What a test chooses of one instance; `wrap` puts a transport of its own around a rank's."""

    layout: str = "tp1"
    page_tokens: int = 4
    dtype: str = "bf16"
    order: Order = HND
    granule: int = 1
    num_pages: int = 32
    staging_bytes: int = 1 << 16
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `EndpointConfig`."""
    memory_seed: int | None = None
    """Where it is given, the memory is declared and drawn from it."""
    has_process: bool = False
    """Whether the endpoints run in processes of their own."""
    wrap: Callable[[int, Transport], Transport] = lambda rank, transport: transport

    def spec(self, cache: Cache) -> Spec:
        storage = Storage(self.page_tokens, self.dtype, self.order, granule=self.granule)
        pages = dict.fromkeys(cache.groups, self.num_pages)
        spec = Spec(parse_layout(self.layout), cache, storage.with_pages(pages))
        if self.memory_seed is None:
            return spec
        return draw_placements(random.Random(self.memory_seed), spec)


@dataclass(frozen=True)
class Job:
    """What is handed over."""

    num_tokens: int = 21
    held: Mapping[str, int] = field(default_factory=dict)
    dps: tuple[int, int] = (0, 0)
    named_dp: int | None = None
    is_verified: bool = False


class Instance:
    """The endpoints of one instance, their pools, and the pages that nobody has."""

    def __init__(self, name: str, cache: Cache, side: Side, transport: str) -> None:
        self.name = name
        self.side = side
        self.spec = side.spec(cache)
        self.memory: dict[tuple[int, str], np.ndarray] = {}
        self.ended: list[str] = []
        self.endpoints: list[Any] = []
        """`Endpoint` or `RemoteEndpoint`."""
        ranks = range(self.spec.layout.num_ranks)
        opened: list[Any] = [
            EndpointProcess(TransportConfig(transport, {}))
            if side.has_process
            else side.wrap(rank, open_transport(transport))
            for rank in ranks
        ]
        for rank in ranks:
            self.endpoints.append(self._endpoint(rank, opened[rank]))
        assert self.first.wait_ready(PATIENCE_S), f"{name} did not come up: {self.ended}"
        rng = np.random.default_rng(1)
        self.free = {
            (rank, space): rng.permutation(self.spec.storage.pages_of(space)).tolist()
            for rank in range(self.spec.layout.num_ranks)
            for space in sorted(set(page_spaces(self.spec, rank).values()))
        }

    def _endpoint(self, rank: int, transport: Any) -> Any:
        pools = {name: transport.allocate(size) for name, size in buffers(self.spec, rank, "pool").items()}
        self.memory |= {(rank, name): pool for name, pool in pools.items()}
        config = EndpointConfig(
            instance=self.name,
            spec=self.spec,
            rank=rank,
            secret=SECRET,
            timings=TIMINGS,
            staging_bytes=self.side.staging_bytes,
        )
        config = replace(config, **self.side.options)
        if rank:
            first = self.first
            config = replace(config, epoch=first.config.epoch, coordinator=first.address, embed_registry=None)
            config = replace(config, registry=first.registry, sockets=SocketConfig())
        kind = RemoteEndpoint if self.side.has_process else Endpoint
        return kind(config, pools, transport, on_end=self.ended.append)

    @property
    def first(self) -> Any:
        """The one that hosts the coordinator."""
        return self.endpoints[0]

    def take(self, dp: int, num_tokens: int) -> dict[int, dict[str, np.ndarray]]:
        """Pages for a prompt, on every rank of a group; more than a rank needs where tokens are cut."""
        num_pages = -(-num_tokens // self.side.page_tokens)
        found: dict[int, dict[str, np.ndarray]] = {}
        for rank in self.spec.layout.group(dp):
            for group in self.spec.cache.groups:
                free = self.free[rank, page_spaces(self.spec, rank)[group]]
                taken = [free.pop() for _ in range(num_pages if group != "state" else 1)]
                found.setdefault(rank, {})[group] = np.array(taken, dtype=np.int64)
        return found

    def counts(self) -> dict[str, int]:
        """What is under way on all ranks together."""
        total: dict[str, int] = {}
        for endpoint in self.endpoints:
            for name, count in endpoint.counts().items():
                total[name] = total.get(name, 0) + count
        return total

    def is_idle(self) -> bool:
        """Whether nothing is under way; what stands between transfers does not count."""
        standing = {"connections", "sessions", "writers"}
        return not any(count for name, count in self.counts().items() if name not in standing)

    def close(self) -> None:
        for endpoint in reversed(self.endpoints):
            endpoint.close()


class World:
    """A source, a target, and what was handed over between them."""

    def __init__(self, source: Side, target: Side, transport: str = "memory", cache: Cache = CACHE) -> None:
        self.cache = cache
        self.transport = transport
        self.rng = np.random.default_rng(7)
        self.target = Instance("d0", cache, target, transport)
        if registry := self.target.first.registry:
            source = replace(source, options={**source.options, "registry": registry})
        self.source = Instance("p0", cache, source, transport)
        for buffer in self.target.memory.values():
            buffer[:] = self.rng.integers(0, 256, len(buffer), dtype=np.uint8)
        self.before = {key: buffer.copy() for key, buffer in self.target.memory.items()}
        self.transfers: list[Transfer] = []
        self.packs(False)

    def packs(self, is_packing: bool = True) -> None:
        """Whether the pairs of transfers to come gather each chunk into one copy."""
        if isinstance(self.target.first, RemoteEndpoint):
            return
        self.target.first.coordinator.inbound.cost = ALWAYS_PACK if is_packing else NEVER_PACK

    def restart_source(self) -> None:
        """The source ends, and comes back under its name with pools of its own."""
        self.source.close()
        self.source = Instance("p0", self.cache, self.source.side, self.transport)

    def transfer(self, job: Job | None = None, transfer_id: str = "") -> Transfer:
        """A transfer with pages on both sides and a filled source; nobody has been told of it."""
        found = Transfer(self, job or Job(), transfer_id or f"t{len(self.transfers)}")
        self.transfers.append(found)
        return found

    def hand_off(self, job: Job | None = None) -> Transfer:
        """A whole transfer, every byte compared."""
        found = self.transfer(job)
        found.receive()
        found.send()
        found.offer_all()
        found.commit()
        found.check_ready()
        return found

    def check_untouched(self) -> None:
        """No byte of the target changed that was not granted, and none of the source but by the test."""
        allowed = {key: np.zeros(len(buffer), dtype=bool) for key, buffer in self.before.items()}
        for transfer in self.transfers:
            transfer.mark(allowed)
        for key, buffer in self.target.memory.items():
            changed = np.flatnonzero((buffer != self.before[key]) & ~allowed[key])
            assert not len(changed), f"{len(changed)} bytes of {key} changed, the first at {changed[0]}"

    def check_idle(self) -> None:
        """Nothing is under way on either side, and no instance ended."""
        for instance in (self.source, self.target):
            until(instance.is_idle, lambda one=instance: f"{one.name} has {one.counts()}")
            assert not instance.ended
            for endpoint in [one for one in instance.endpoints if isinstance(one, Endpoint)]:
                endpoint._rank.pools.staging.check_integrity()
                assert not endpoint._rank.pools.staging.leased_bytes

    def close(self) -> None:
        self.source.close()
        self.target.close()


class Transfer:
    """One transfer: its pages, its chunks, and the handles of every rank."""

    def __init__(self, world: World, job: Job, transfer_id: str) -> None:
        self.world = world
        self.job = job
        self.id = transfer_id
        self.prompt = Prompt(job.num_tokens, dict(job.held))
        self.digest = prompt_digest(range(job.num_tokens))
        self.source_tables = world.source.take(job.dps[0], job.num_tokens)
        self.target_tables = world.target.take(job.dps[1], job.num_tokens)
        self.sendings: dict[int, Sending] = {}
        self.receivings: dict[int, Receiving] = {}
        self.salt = len(world.transfers)
        self.fill()

    def fill(self) -> None:
        """Prefill: the pages of the source get their content."""
        world = self.world
        for held in self._held(world.source, self.job.num_tokens):
            values = self._values(held, world.source.spec.storage.dtype_of(held.component))
            put(world.source.memory[held.rank, held.buffer], held.offsets, values)

    def move_source_pages(self) -> None:
        """Another request gets the source's pages and overwrites them; this one is prefilled into others."""
        source, rng = self.world.source, self.world.rng
        for held in self._held(source, self.job.num_tokens):
            noise = rng.integers(0, 256, (len(held.offsets), held.item_bytes), dtype=np.uint8)
            put(source.memory[held.rank, held.buffer], held.offsets, noise)
        before = self.source_tables
        self.source_tables = source.take(self.job.dps[0], self.job.num_tokens)
        for rank, tables in before.items():
            for group, ids in tables.items():
                source.free[rank, group][:0] = ids.tolist()
        self.fill()

    def _held(self, instance: Instance, num_tokens: int) -> Iterator[Held]:
        """What the ranks of one side hold of this prompt, by rank and component."""
        is_source = instance.name == self.world.source.name
        dp = self.job.dps[0 if is_source else 1]
        tables = self.source_tables if is_source else self.target_tables
        return holdings(instance.spec, dp, num_tokens, tables, "source" if is_source else "target")

    def _values(self, held: Held, dtype: str) -> np.ndarray:
        """The bytes of elements in an element type of the source; no other transfer has the same."""
        values = raw_values(held.identities, item_bytes(dtype), self.salt)
        if dtype != self.world.target.spec.storage.dtype_of(held.component):
            # A converted NaN may come out as another one: without this bit of its exponent, none is one.
            values[:, -1] &= 0xBF
        return values

    # Calls of engines.

    def request(self, ranks: Iterable[int], **changes: Any) -> Request:
        request = Request(
            transfer=self.id,
            source=self.world.source.first.address,
            digest=self.digest,
            pages={rank: self.target_tables[rank] for rank in ranks},
            held=dict(self.job.held),
            source_dp=self.job.named_dp,
            is_verified=self.job.is_verified,
        )
        return replace(request, **changes)

    def receive(self, *, is_each: bool = False, **changes: Any) -> Receiving:
        """One rank asks for all of its group, or each for itself."""
        ranks = sorted(self.target_tables)
        for rank in ranks if is_each else ranks[:1]:
            pages_of = [rank] if is_each else ranks
            endpoint = self.world.target.endpoints[rank]
            self.receivings[rank] = endpoint.receive(self.request(pages_of, **changes))
        return self.receiving

    def send(self) -> None:
        for rank in sorted(self.source_tables):
            self.sendings[rank] = self.world.source.endpoints[rank].send(self.id, self.digest)

    def offer(self, layers: tuple[int, int], tokens: tuple[int, int], **options: Any) -> None:
        """Every rank says that a chunk is ready."""
        for rank, sending in self.sendings.items():
            sending.ready(layers, tokens, self.source_tables[rank], **options)

    def offer_all(self) -> None:
        """Every rank offers chunks: what a prefix cache had first, the rest in any order."""
        rng, num_tokens, num_layers = self.world.rng, self.job.num_tokens, last_layer(self.world.cache)
        [first, *later] = cuts(rng, num_tokens)
        groups = cuts(rng, num_layers)
        rest = [(layers, tokens) for layers in groups for tokens in later]
        for rank, sending in self.sendings.items():
            sending.ready((0, num_layers), first, self.source_tables[rank])
            for i in rng.permutation(len(rest)):
                sending.ready(*rest[i], self.source_tables[rank])

    def commit(self, aux: Aux = AUX) -> None:
        """Every rank has said everything; the last one sampled."""
        for rank, sending in self.sendings.items():
            sending.commit(aux if rank == max(self.sendings) else None)

    # What came of it.

    @property
    def receiving(self) -> Receiving:
        """The first handle of the target."""
        return self.receivings[min(self.receivings)]

    @property
    def handles(self) -> list[Handle]:
        return [*self.receivings.values(), *self.sendings.values()]

    def outcome(self) -> Outcome:
        """The one outcome that all handles have, once they have it; all pages are back then."""
        found = [handle.wait(PATIENCE_S) for handle in self.handles]
        assert all(one == found[0] for one in found), found
        for handle in self.handles:
            assert handle.wait_released(PATIENCE_S), f"{handle} of {self.id} keeps its pages"
        for sending in self.sendings.values():
            assert not any(sending.reading().values())
        assert not isinstance(found[0], type(None))
        return found[0]  # type: ignore[return-value]

    def cause(self) -> Cause:
        """Why it failed, on both sides."""
        found = self.outcome()
        assert isinstance(found, Failed), found
        return found.cause

    def check_ready(self) -> None:
        """The cache may be used, and is right in every byte."""
        outcome = self.outcome()
        assert outcome == Ready(AUX), outcome
        num_bytes, num_right = self.compare()
        assert num_right == num_bytes
        self.world.check_untouched()

    def compare(self) -> tuple[int, int]:
        """How many bytes the target needed, and how many it has."""
        source, target = self.world.source.spec.storage, self.world.target.spec.storage
        num_bytes = num_right = 0
        for held in self._held(self.world.target, self.job.num_tokens):
            keep = needed(held.component, self.prompt, 1, held.tokens)
            dtypes = (source.dtype_of(held.component), target.dtype_of(held.component))
            values = np.ascontiguousarray(self._values(held, dtypes[0])[keep])
            wanted = convert(values.reshape(-1), *dtypes).reshape(-1, held.item_bytes)
            at = held.offsets[keep][:, None] + np.arange(held.item_bytes)
            num_bytes += wanted.size
            num_right += int(np.count_nonzero(self.world.target.memory[held.rank, held.buffer][at] == wanted))
        return num_bytes, num_right

    def mark(self, allowed: dict[tuple[int, str], np.ndarray]) -> None:
        """Marks the bytes that this transfer may write."""
        granule = self.world.source.side.granule
        for held in self._held(self.world.target, -(-self.job.num_tokens // granule) * granule):
            offsets = held.offsets[needed(held.component, self.prompt, granule, held.tokens)]
            allowed[held.rank, held.buffer][offsets[:, None] + np.arange(held.item_bytes)] = True


@contextmanager
def worlds(*sides: Side, **options: Any) -> Iterator[World]:
    """A world in which nothing is under way at the end."""
    world = World(*sides, **options)
    try:
        yield world
        world.check_idle()
        world.check_untouched()
    finally:
        world.close()


def without_leaks() -> Iterator[None]:
    """The body of a fixture: a test leaves no thread and no open file of this process behind."""
    before = fds() | threads()
    yield
    # Collecting takes longer than a test, and is seldom needed.
    if fds() | threads() <= before:
        return
    gc.collect()
    until(lambda: fds() | threads() <= before, lambda: f"{(fds() | threads()) - before} are left")


def fds() -> set[str]:
    """Every open file of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the folder itself, read a moment ago
    return {file for file in found if " /sys/" not in file}  # torch reads the processor's caches, once


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def until(
    condition: Callable[[], bool], what: Callable[[], str] | str, timeout_s: float = PATIENCE_S
) -> None:
    """Returns as soon as a condition of other threads holds."""
    limit_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit_s, (
            f"not within {timeout_s} s: {what if isinstance(what, str) else what()}"
        )
        time.sleep(0.001)


def cuts(rng: np.random.Generator, stop: int) -> list[tuple[int, int]]:
    """A range from 0 cut at random places."""
    places = sorted({0, stop, *rng.integers(1, stop + 1, 2).tolist()})
    return list(itertools.pairwise(places))


def last_layer(cache: Cache) -> int:
    """Past the last layer, draft layers counted."""
    return max(stop for component in cache.components for _, stop in component.layers)
