"""One rank in a process of its own: an endpoint, its pools, and orders from the parent.

The parent speaks JSON lines over standard input and output: a list of a method's name and its arguments, and
one line back that begins with a word of its own, since libraries print too. The process ends when the
parent's pipe does, whatever it is busy with.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

import msgspec

from baton.bench.handoff.content import Holder, compare, fill
from baton.bench.handoff.mill import Grist, Mill
from baton.bench.handoff.recording import Recorded
from baton.bench.handoff.records import Order, Received, Sent
from baton.bench.handoff.scene import Scene, own_layers, pages_of, sampler, spec_of
from baton.errors import BatonError
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Aux, Failed, Ready, State
from baton.protocol.timings import Timings
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import Digest, Handle, Receiving, Request, Sending, prompt_digest
from baton.transport import Transport, open_transport, parse_transport
from baton.transport.throttled import throttle

MARK = "baton "
BUSY_S_MAX = 5.0
"""How long a rank that is busy may go on when its parent is gone."""
READY_S_MAX = 60.0
STAGING_BYTES = 256 << 20
"""Memory that is not touched is not taken."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which rank of a scene a process is, and whom it speaks to."""

    scene: Scene
    side: str
    rank: int
    instance: str
    peer: str
    """The other instance."""
    secret: str
    registry: str | None
    coordinator: str | None
    epoch: int
    timings: Timings


class Rank:
    """The child's side; every public method is an order."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.spec = spec_of(part.scene, part.side)
        self.inner, self.transport = _transport(part.scene, part.side)
        sizes = buffers(self.spec, part.rank, part.side)
        self.pools = {name: self.transport.allocate(num_bytes) for name, num_bytes in sizes.items()}
        self.endpoint = Endpoint(_config(part), self.pools, self.transport)
        self.handles: dict[str, Handle] = {}

    def address(self) -> dict[str, Any]:
        """The coordinator's address and epoch, and the name by which this rank's memory is known."""
        endpoint = self.endpoint
        epoch, incarnation = endpoint.config.epoch, self.transport.incarnation
        return {"coordinator": endpoint.address, "epoch": epoch, "incarnation": incarnation}

    def await_ready(self) -> bool:
        """Where the coordinator is: waits until the whole instance is there."""
        return self.endpoint.wait_ready(READY_S_MAX)

    def fill(self, slot: int, salt: int) -> int:
        """Writes the content of a request into its pages."""
        scene = self.part.scene
        fill(self._holder(), scene.prompt, self._pages(slot), salt, is_finite=scene.is_converted)
        return slot

    def wipe(self) -> bool:
        """Sets every byte of the pools to zero."""
        for pool in self.pools.values():
            pool[:] = 0
        return True

    def compare(self, slot: int, salt: int) -> list[int]:
        """Bytes that a request's pages should have been sent, and how many of them are right."""
        source = spec_of(self.part.scene, "source")
        found = compare(self._holder(), source, self.part.scene.prompt, self._pages(slot), salt)
        return [found.num_bytes, found.num_right]

    def run_send(self, found: dict[str, Any]) -> dict[str, Any]:
        """A source rank's whole part of a transfer, paced as ordered."""
        order = msgspec.convert(found, Order)
        self.transport.take()
        self.inner.take()
        _sleep_until(order.start_s)
        called_s = monotonic()
        self.send(order.transfer)
        ends = []
        for step in order.steps:
            _sleep_until(order.start_s + step.at_s)
            ends.append(monotonic())
            if step.sends[0] < step.sends[1]:
                self.ready(order.transfer, order.slot, step.sends, step.tokens)
        committed_s = monotonic()
        self.commit(order.transfer, order.is_sampler)
        outcome = self.handles[order.transfer].wait(order.timeout_s)
        record = Sent(
            rank=self.part.rank,
            called_s=called_s,
            layer_ends_s=tuple(ends),
            committed_s=committed_s,
            settled_s=monotonic(),
            outcome=said(outcome),
            copies=tuple(self.transport.take()),
            inner_copies=tuple(self.inner.take()) if self.inner is not self.transport else (),
        )
        return asdict(record)

    def run_receive(self, found: dict[str, Any]) -> dict[str, Any]:
        """The target's whole part of a transfer."""
        order = msgspec.convert(found, Order)
        _sleep_until(order.start_s)
        called_s = monotonic()
        self.receive(order.transfer, order.slot, order.is_verified)
        outcome = self.handles[order.transfer].wait(order.timeout_s)
        settled_s = monotonic()
        return asdict(Received(self.part.rank, called_s, settled_s, said(outcome)))

    def run_series(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Several transfers, each from its own moment on."""
        run = self.run_send if self.part.side == "source" else self.run_receive
        records = []
        for order in orders:
            records.append(run(order))
            self.handles.pop(order["transfer"]).wait_released(order["timeout_s"])
        return records

    def grind(self, found: dict[str, Any]) -> dict[str, Any]:
        """Many small transfers at a time."""
        mill = Mill(self, msgspec.convert(found, Grist), is_target=self.part.side == "target")
        self.endpoint.on_change(mill.changed)
        return mill.run()

    def start(self, transfer: str, slot: int, salt: int, is_central: bool = False) -> bool:
        """This rank's part of a transfer whose content is ready at once."""
        if self.part.side == "target":
            return self.receive(transfer, slot, ranks=None if is_central else [self.part.rank])
        self.fill(slot, salt)
        self.send(transfer)
        layers = own_layers(self.part.scene, self.part.rank)
        self.ready(transfer, slot, layers, (0, self.part.scene.num_tokens))
        return self.commit(transfer, is_sampler=self.part.rank == sampler(self.part.scene))

    def send(self, transfer: str) -> bool:
        """Begins the source's end of a transfer."""
        self.handles[transfer] = self.endpoint.send(transfer, self.digest(transfer))
        return True

    def ready(self, transfer: str, slot: int, layers: Sequence[int], tokens: Sequence[int]) -> bool:
        """Offers a chunk."""
        (first, last), (start, stop) = layers, tokens
        self._sending(transfer).ready(layers=(first, last), tokens=(start, stop), pages=self._pages(slot))
        return True

    def commit(self, transfer: str, is_sampler: bool) -> bool:
        """Ends the source's chunks."""
        self._sending(transfer).commit(Aux(tokens=(7,), fields={"from": transfer}) if is_sampler else None)
        return True

    def receive(
        self, transfer: str, slot: int, is_verified: bool = False, ranks: Sequence[int] | None = None
    ) -> bool:
        """Begins the target's end of a transfer, with the pages of these ranks or of the whole dp group."""
        layout, scene = self.spec.layout, self.part.scene
        if ranks is None:
            ranks = layout.group(layout.coordinates(self.part.rank)["dp"])
        request = Request(
            transfer,
            source=self.part.peer,
            digest=self.digest(transfer),
            pages={rank: pages_of(scene, "target", rank, slot) for rank in ranks},
            is_verified=is_verified,
        )
        self.handles[transfer] = self.endpoint.receive(request)
        return True

    def abort(self, transfer: str) -> bool:
        """Gives a transfer up."""
        handle = self.handles[transfer]
        assert isinstance(handle, Sending | Receiving)
        handle.abort("ordered")
        return True

    def wait(self, transfer: str, timeout_s: float) -> dict[str, Any]:
        """The outcome of a transfer and when it was known, or `waiting` when the time is up."""
        state = self.handles[transfer].wait(timeout_s)
        return {**told(state), "at_s": monotonic(), "is_released": self.handles[transfer].is_released}

    def wait_released(self, transfer: str, timeout_s: float) -> bool:
        """Whether the pages of a transfer came back in time."""
        return self.handles[transfer].wait_released(timeout_s)

    def held(self) -> list[str]:
        """The transfers whose pages have not come back."""
        return [transfer for transfer, handle in self.handles.items() if not handle.is_released]

    def num_copying(self) -> int:
        """At a source: copies that have not ended."""
        return int(self.transport.num_open)

    def num_read(self, transfer: str) -> int:
        """At a source: pages that a copy of a transfer reads or will read."""
        return sum(len(pages) for pages in self._sending(transfer).reading().values())

    def counts(self) -> dict[str, int]:
        """How much is under way on this rank, and at the coordinator where it is hosted."""
        return dict(self.endpoint.counts())

    def num_descriptors(self) -> int:
        """Open file descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))

    def close(self) -> bool:
        """Leaves the instance."""
        self.endpoint.close()
        return True

    def digest(self, transfer: str) -> Digest:
        """Of a prompt that no other transfer has."""
        return prompt_digest(range(self.part.scene.num_tokens), salt=transfer)

    def _pages(self, slot: int) -> Mapping[str, Any]:
        return pages_of(self.part.scene, self.part.side, self.part.rank, slot)

    def _holder(self) -> Holder:
        return Holder(self.spec, self.part.rank, self.pools)

    def _sending(self, transfer: str) -> Sending:
        handle = self.handles[transfer]
        assert isinstance(handle, Sending)
        return handle


def said(state: State) -> str:
    """An outcome in a word, a failure with its cause."""
    return f"failed: {state.cause}" if isinstance(state, Failed) else type(state).__name__.lower()


def told(state: State) -> dict[str, Any]:
    """An outcome as plain data."""
    match state:
        case Failed(cause=cause):
            place = {"instance": cause.instance, "rank": cause.rank, "text": cause.text}
            return {"state": "failed", "why": cause.why.value, "stage": cause.stage.value, **place}
        case Ready(aux=aux):
            return {"state": "ready", "from": aux.fields.get("from")}
        case _:
            return {"state": type(state).__name__.lower()}


def _transport(scene: Scene, side: str) -> tuple[Recorded, Any]:
    """The transport as it is, and as the endpoint sees it: the same, or behind a link."""
    name, options = parse_transport(scene.transport)
    plain: Transport = open_transport(name, **options)
    inner = Recorded(plain)
    if not scene.link_bytes_per_s:
        return inner, inner
    # A rank has one network card: all its peers share the link.
    slow = throttle(inner, bytes_per_s=scene.link_bytes_per_s, is_shared=True)
    return inner, Recorded(slow) if side == "source" else slow


def _config(part: Part) -> EndpointConfig:
    return EndpointConfig(
        instance=part.instance,
        role="prefill" if part.side == "source" else "decode",
        spec=spec_of(part.scene, part.side),
        rank=part.rank,
        fingerprint=part.scene.model,
        secret=bytes.fromhex(part.secret),
        registry=part.registry,
        coordinator=part.coordinator,
        epoch=part.epoch,
        timings=part.timings,
        # Between equal sides nothing is packed or converted.
        staging_bytes=0 if part.scene.source == part.scene.target else STAGING_BYTES,
    )


def _sleep_until(when_s: float) -> None:
    while (left_s := when_s - monotonic()) > 0:
        sleep(left_s)


def say(answer: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def _listen(orders: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        orders.put(line)
    orders.put(None)
    threading.Event().wait(BUSY_S_MAX)
    os._exit(1)


def serve() -> None:
    """The child's loop: the first line says who it is, each further one what to do."""
    orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    first = orders.get()
    if first is None:
        return
    rank = Rank(msgspec.json.decode(first, type=Part))
    say(rank.address())
    while (line := orders.get()) is not None:
        method, *arguments = json.loads(line)
        try:
            say({"answer": getattr(rank, method)(*arguments)})
        except BatonError as error:
            say({"error": str(error)})
    rank.close()


if __name__ == "__main__":
    serve()
    os._exit(0)  # a library's threads must not keep a measured machine busy
