"""One rank in a process of its own: an endpoint and its pools, driven by calls from the parent.

Calls and answers are JSON lines on stdin and stdout. The process ends when the parent closes its stdin, also
when it is busy.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

import msgspec

from baton.bench.handoff.records import Received, RecordingTransport, Sent, TransferOrder
from baton.bench.handoff.stress import StressOptions, StressRun
from baton.bench.handoff.workload import Workload, own_layers, pages_of, sampler_rank, spec_of
from baton.plan.content import RankPools, compare, fill
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Aux, Failed, State
from baton.protocol.timings import Timings
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import Digest, Handle, Request, Sending, prompt_digest
from baton.supervisor import reply, serve_calls
from baton.transport import Transport, open_transport, parse_transport
from baton.transport.throttled import throttle

BUSY_S_MAX = 5.0
"""How long a busy rank may go on when its parent is gone."""
READY_S_MAX = 60.0
STAGING_BYTES = 256 << 20
"""Only memory that is touched is taken."""


@dataclass(frozen=True, slots=True)
class BenchRankConfig:
    """Which rank of a workload a process is, and its peers."""

    workload: Workload
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


class BenchRank:
    """Every public method can be called by the parent."""

    def __init__(self, config: BenchRankConfig) -> None:
        self.config = config
        self.spec = spec_of(config.workload, config.side)
        self.inner, self.transport = _transport(config.workload, config.side)
        sizes = buffers(self.spec, config.rank, config.side)
        self.pools = {name: self.transport.allocate(num_bytes) for name, num_bytes in sizes.items()}
        self.endpoint = Endpoint(_endpoint_config(config), self.pools, self.transport)
        self.handles: dict[str, Handle] = {}

    def address(self) -> dict[str, Any]:
        """The coordinator's address and epoch, and the incarnation of this rank's transport."""
        endpoint = self.endpoint
        epoch, incarnation = endpoint.config.epoch, self.transport.incarnation
        return {"coordinator": endpoint.address, "epoch": epoch, "incarnation": incarnation}

    def await_ready(self) -> bool:
        """On the coordinator's rank: waits until the instance is complete."""
        return self.endpoint.wait_ready(READY_S_MAX)

    def fill(self, slot: int, salt: int) -> int:
        """Writes the content of a request into its pages."""
        workload = self.config.workload
        fill(self._rank_pools(), workload.prompt, self._pages(slot), salt, is_finite=workload.is_converted)
        return slot

    def wipe(self) -> bool:
        """Sets every byte of the pools to zero."""
        for pool in self.pools.values():
            pool[:] = 0
        return True

    def compare(self, slot: int, salt: int) -> list[int]:
        """Bytes that a request's pages should have received, and how many of them are right."""
        source = spec_of(self.config.workload, "source")
        verdict = compare(self._rank_pools(), source, self.config.workload.prompt, self._pages(slot), salt)
        return [verdict.num_bytes, verdict.num_right]

    def run_send(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A source rank's part of a transfer, at the pace of the order."""
        order = msgspec.convert(fields, TransferOrder)
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
            rank=self.config.rank,
            called_s=called_s,
            layer_ends_s=tuple(ends),
            committed_s=committed_s,
            settled_s=monotonic(),
            outcome=outcome_text(outcome),
            copies=tuple(self.transport.take()),
            inner_copies=tuple(self.inner.take()) if self.inner is not self.transport else (),
        )
        return asdict(record)

    def run_receive(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The target's part of a transfer."""
        order = msgspec.convert(fields, TransferOrder)
        _sleep_until(order.start_s)
        called_s = monotonic()
        self.receive(order.transfer, order.slot, order.is_verified)
        outcome = self.handles[order.transfer].wait(order.timeout_s)
        settled_s = monotonic()
        return asdict(Received(self.config.rank, called_s, settled_s, outcome_text(outcome)))

    def run_series(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Several transfers, each from its start time on."""
        run = self.run_send if self.config.side == "source" else self.run_receive
        records = []
        for order in orders:
            records.append(run(order))
            self.handles.pop(order["transfer"]).wait_released(order["timeout_s"])
        return records

    def stress(self, options: dict[str, Any]) -> dict[str, Any]:
        """Many small transfers at a time."""
        load = StressRun(
            self, msgspec.convert(options, StressOptions), is_target=self.config.side == "target"
        )
        self.endpoint.on_change(load.changed)
        return load.run()

    def start(self, transfer: str, slot: int, salt: int) -> bool:
        """This rank's part of a transfer whose content is all ready."""
        if self.config.side == "target":
            return self.receive(transfer, slot, ranks=[self.config.rank])
        self.fill(slot, salt)
        self.send(transfer)
        layers = own_layers(self.config.workload, self.config.rank)
        self.ready(transfer, slot, layers, (0, self.config.workload.num_tokens))
        return self.commit(transfer, is_sampler=self.config.rank == sampler_rank(self.config.workload))

    def send(self, transfer: str) -> bool:
        """Starts a transfer at a source."""
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
        """Starts a transfer at a target, with the pages of these ranks or of the whole dp group."""
        layout, workload = self.spec.layout, self.config.workload
        if ranks is None:
            ranks = layout.group(layout.coordinates(self.config.rank)["dp"])
        request = Request(
            transfer,
            source=self.config.peer,
            digest=self.digest(transfer),
            pages={rank: pages_of(workload, "target", rank, slot) for rank in ranks},
            is_verified=is_verified,
        )
        self.handles[transfer] = self.endpoint.receive(request)
        return True

    def close(self) -> bool:
        """Leaves the instance."""
        self.endpoint.close()
        return True

    def digest(self, transfer: str) -> Digest:
        """The digest of a prompt that no other transfer has."""
        return prompt_digest(range(self.config.workload.num_tokens), salt=transfer)

    def _pages(self, slot: int) -> Mapping[str, Any]:
        return pages_of(self.config.workload, self.config.side, self.config.rank, slot)

    def _rank_pools(self) -> RankPools:
        return RankPools(self.spec, self.config.rank, self.pools)

    def _sending(self, transfer: str) -> Sending:
        handle = self.handles[transfer]
        assert isinstance(handle, Sending)
        return handle


def outcome_text(state: State) -> str:
    """An outcome in one word; a failure with its cause."""
    return f"failed: {state.cause}" if isinstance(state, Failed) else type(state).__name__.lower()


def _transport(workload: Workload, side: str) -> tuple[RecordingTransport, Any]:
    """The transport itself, and what the endpoint uses: the same, or a throttled link in front of it."""
    name, options = parse_transport(workload.transport)
    plain: Transport = open_transport(name, **options)
    inner = RecordingTransport(plain)
    if not workload.link_bytes_per_s:
        return inner, inner
    slow = throttle(inner, bytes_per_s=workload.link_bytes_per_s)
    return inner, RecordingTransport(slow) if side == "source" else slow


def _endpoint_config(config: BenchRankConfig) -> EndpointConfig:
    return EndpointConfig(
        instance=config.instance,
        role="prefill" if config.side == "source" else "decode",
        spec=spec_of(config.workload, config.side),
        rank=config.rank,
        fingerprint=config.workload.model,
        secret=bytes.fromhex(config.secret),
        registry=config.registry,
        coordinator=config.coordinator,
        epoch=config.epoch,
        timings=config.timings,
        # Between equal sides nothing is packed or converted.
        staging_bytes=0 if config.workload.source == config.workload.target else STAGING_BYTES,
    )


def _sleep_until(when_s: float) -> None:
    while (left_s := when_s - monotonic()) > 0:
        sleep(left_s)


def _lines() -> Iterator[str]:
    """Lines of stdin; when it ends, a busy rank is ended too."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)
        threading.Event().wait(BUSY_S_MAX)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get()) is not None:
        yield line


def main(rank_type: type[BenchRank] = BenchRank) -> None:
    """Runs a rank: the first line of stdin is the configuration, each further one a call."""
    lines = _lines()
    first = next(lines, None)
    if first is None:
        return
    rank = rank_type(msgspec.json.decode(first, type=BenchRankConfig))
    reply(rank.address())
    serve_calls(rank, lines)
    rank.close()
    os._exit(0)  # a library's threads must not keep a measured machine busy


if __name__ == "__main__":
    main()
