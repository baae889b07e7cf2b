"""Two instances of rank processes and a registry, as their parent sees them."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self

import msgspec

from baton.bench.handoff.records import Handoff, Received, Sent, TransferOrder
from baton.bench.handoff.workload import (
    SIDES,
    PrefillTiming,
    Workload,
    num_ranks,
    sampler_rank,
    schedule,
    spec_of,
)
from baton.errors import EngineError
from baton.plan.content import Verdict
from baton.protocol.timings import Timings
from baton.supervisor import ChildProcess, baton_command

LEAD_S = 0.03
"""From an order to its start time, so that every process has it in time."""
INSTANCES = {"source": "prefill-0", "target": "decode-0"}
# Each process has work for one core; a thread pool in every one gets in the way.
ONE_THREAD = ("env", "OMP_NUM_THREADS=1")


class RankProcess(ChildProcess):
    """One rank; `ask` calls a method of `baton.bench.handoff.rank.BenchRank` in it."""

    def __init__(self, side: str, rank: int, module: str) -> None:
        self.side, self.rank, self.incarnation = side, rank, ""
        argv = [*ONE_THREAD, sys.executable, "-m", module]
        super().__init__(f"{side} rank {rank}", argv, has_stdin=True)


class RegistryProcess:
    """A registry that keeps its address when it is restarted."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._secret = folder / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_bytes(secret)
        self.url = ""
        self.start()

    def start(self) -> None:
        """Starts it, at the address it had before if it had one."""
        port = self.url.rpartition(":")[2] or "0"
        command = baton_command("registry", "--port", port, "--secret-file", str(self._secret))
        with ExitStack() as stack:
            self.process = ChildProcess("the registry", [*ONE_THREAD, *command])
            stack.callback(self.process.close)
            self.url = self.process.wait_line("registry at ").rstrip("/")
            stack.pop_all()

    def stop(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.close()


@dataclass(slots=True)
class RankFleet:
    """All processes of a workload; leaving the context ends them."""

    workload: Workload
    timings: Timings = field(default_factory=Timings)
    sides: dict[str, list[RankProcess]] = field(default_factory=dict)
    registry: RegistryProcess | None = None
    rank_module: str = "baton.bench.handoff.rank"
    """What a rank process runs."""
    secret: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())
    _stack: ExitStack = field(default_factory=ExitStack)
    _num_transfers: int = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end_ranks)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
            self.registry = RegistryProcess(folder, self.secret)
            stack.callback(self.registry.stop)
            for side in SIDES:  # all of them load at the same time
                self._launch(side)
            for side in SIDES:
                self._configure(side)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        self._stack.close()

    def _end_ranks(self) -> None:
        ranks = [rank for side in self.sides.values() for rank in side]
        for rank in ranks:  # all are told to end before one is waited for
            rank.close_stdin()
        for rank in ranks:
            rank.close()
        self.sides.clear()

    def _launch(self, side: str) -> None:
        self.sides[side] = [
            RankProcess(side, number, self.rank_module) for number in range(num_ranks(self.workload, side))
        ]

    def _configure(self, side: str) -> None:
        """Sends every rank its configuration; rank 0 hosts the coordinator."""
        first, *others = self.sides[side]
        first.send(self._config(first, None, 0))
        address = first.receive()
        first.incarnation = address["incarnation"]
        for rank in others:
            rank.send(self._config(rank, address["coordinator"], address["epoch"]))
        for rank in others:
            rank.incarnation = rank.receive()["incarnation"]
        if not first.ask("await_ready"):
            raise EngineError(f"the {side} instance was not complete in time")

    def _config(self, rank: RankProcess, coordinator: str | None, epoch: int) -> dict[str, Any]:
        assert self.registry is not None
        other = "target" if rank.side == "source" else "source"
        return {
            "workload": msgspec.to_builtins(self.workload),
            "side": rank.side,
            "rank": rank.rank,
            "instance": INSTANCES[rank.side],
            "peer": INSTANCES[other],
            "secret": self.secret.hex(),
            "registry": self.registry.url,
            "coordinator": coordinator,
            "epoch": epoch,
            "timings": msgspec.to_builtins(self.timings),
        }

    @property
    def sources(self) -> list[RankProcess]:
        """The source ranks of dp group 0, which take part."""
        return self._group("source")

    @property
    def targets(self) -> list[RankProcess]:
        """The target ranks of dp group 0, which take part."""
        return self._group("target")

    def _group(self, side: str) -> list[RankProcess]:
        return [self.sides[side][rank] for rank in spec_of(self.workload, side).layout.group(0)]

    def new_transfer(self) -> str:
        """A new transfer id."""
        self._num_transfers += 1
        return f"transfer-{self._num_transfers}"

    def fill(self, slots: Iterable[int], salt: int = 0) -> None:
        """Writes content into the source's pages of these slots, a different one for each slot."""
        for slot in slots:
            ask_all(self.sources, "fill", slot, self.salt(slot, salt))

    def salt(self, slot: int, salt: int = 0) -> int:
        """The salt of a slot's content."""
        return salt * 1_000_003 + slot

    def compare(self, slot: int = 0, salt: int = 0) -> Verdict:
        """Compares every byte of a slot, at every target rank."""
        counts = ask_all(self.targets, "compare", slot, self.salt(slot, salt))
        return total(Verdict(*count) for count in counts)

    def hand_off(self, pace: PrefillTiming, *, is_verified: bool = False) -> Handoff:
        """One paced transfer of slot 0, as all ranks recorded it."""
        order = TransferOrder(self.new_transfer(), 0, monotonic() + LEAD_S, is_verified=is_verified)
        return self.hand_off_all([order], pace)[0]

    def hand_off_all(self, orders: Sequence[TransferOrder], pace: PrefillTiming) -> list[Handoff]:
        """Transfers one after another, all at the same pace, each from its start time on."""
        steps = schedule(self.workload, pace)
        first = self.targets[0]
        first.begin("run_series", [msgspec.to_builtins(order) for order in orders])
        for rank in self.sources:
            is_sampler = rank.rank == sampler_rank(self.workload)
            own = {"steps": msgspec.to_builtins(steps[rank.rank]), "is_sampler": is_sampler}
            rank.begin("run_series", [{**msgspec.to_builtins(order), **own} for order in orders])
        received = msgspec.convert(first.answer(), list[Received])
        sent = [msgspec.convert(rank.answer(), list[Sent]) for rank in self.sources]
        incarnations = {rank.incarnation: rank.rank for rank in self.targets}
        return [
            Handoff(
                transfer=order.transfer,
                start_s=order.start_s,
                steps={rank: tuple(of_rank) for rank, of_rank in steps.items()},
                sent={series[index].rank: series[index] for series in sent},
                received=received[index],
                target_ranks=incarnations,
            )
            for index, order in enumerate(orders)
        ]


def total(verdicts: Iterable[Verdict]) -> Verdict:
    """Several verdicts as one."""
    sums = [(verdict.num_bytes, verdict.num_right) for verdict in verdicts]
    return Verdict(sum(num_bytes for num_bytes, _ in sums), sum(num_right for _, num_right in sums))


def ask_all(ranks: Sequence[RankProcess], method: str, *arguments: Any) -> list[Any]:
    """The same call to several ranks at once."""
    for rank in ranks:
        rank.begin(method, *arguments)
    return [rank.answer() for rank in ranks]
