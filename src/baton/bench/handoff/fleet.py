"""Two instances of rank processes and a registry, as their parent sees them."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import msgspec

from baton.bench.handoff.pacing import Pace, schedule
from baton.bench.handoff.processes import Child
from baton.bench.handoff.records import HandOver, Order, Received, Sent
from baton.bench.handoff.scene import SIDES, Scene, num_ranks, sampler, spec_of
from baton.errors import EngineError
from baton.plan.execution import Verdict
from baton.protocol.timings import Timings

LEAD_S = 0.03
"""From an order to the moment it names, so that every process has it in time."""
INSTANCES = {"source": "prefill-0", "target": "decode-0"}
_URL = re.compile(r"https?://\S+")


class RankProcess:
    """One rank; `ask` calls a method of `baton.bench.handoff.rank.Rank` there."""

    def __init__(self, side: str, rank: int) -> None:
        self.side, self.rank = side, rank
        self.child = Child(f"{side} rank {rank}", ["-m", "baton.bench.handoff.rank"])
        self.incarnation = ""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method and waits for its answer."""
        self.begin(method, *arguments)
        return self.answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Calls a method whose answer is fetched later."""
        self.child.tell([method, *arguments])

    def answer(self) -> Any:
        """The answer to the oldest call without one."""
        found = self.child.told()
        if "error" in found:
            raise EngineError(f"{self.child.name}: {found['error']}")
        return found["answer"]


class Registry:
    """A registry process at an address that outlives it."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._secret = folder / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_bytes(secret)
        self._port = 0
        self.url = ""
        self.start()

    def start(self) -> None:
        """Begins, at the address it had before if it had one."""
        words = ["-m", "baton", "registry", "--port", str(self._port), "--secret-file", str(self._secret)]
        self.child = Child("the registry", words)
        with ExitStack() as stack:
            stack.callback(self.child.close)
            found = _URL.search(self.child.line().decode())
            if found is None:
                raise EngineError("the registry did not print its address")
            stack.pop_all()
        self.url = found[0].rstrip("/")
        self._port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Ends it at once."""
        self.child.kill()
        self.child.close()


@dataclass(slots=True)
class Fleet:
    """Everything that runs; leaving the context ends all of it."""

    scene: Scene
    timings: Timings = field(default_factory=Timings)
    sides: dict[str, list[RankProcess]] = field(default_factory=dict)
    registry: Registry | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())
    _stack: ExitStack = field(default_factory=ExitStack)
    _num_transfers: int = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end_ranks)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
            self.registry = Registry(folder, self.secret)
            stack.callback(self.registry.stop)
            for side in SIDES:  # all of them load while the first are being met
                self._launch(side)
            for side in SIDES:
                self._assemble(side)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        self._stack.close()

    def _end_ranks(self) -> None:
        """All are told before any is waited for."""
        children = [rank.child for side in self.sides.values() for rank in side]
        for child in children:
            child.hang_up()
        for child in children:
            child.close()
        self.sides.clear()

    def end(self, side: str) -> None:
        """Ends one side's processes at once, stopped or not."""
        for rank in self.sides.pop(side):
            rank.child.kill()
            rank.child.close()

    def mend(self) -> None:
        """Starts the sides anew of which a rank is missing."""
        for side in SIDES:
            ranks = self.sides.get(side, [])
            if not ranks or any(rank.child.await_end(0) for rank in ranks):
                if side in self.sides:
                    self.end(side)
                self.start(side)

    def start(self, side: str) -> None:
        """Starts one side's ranks."""
        self._launch(side)
        self._assemble(side)

    def _launch(self, side: str) -> None:
        self.sides[side] = [RankProcess(side, number) for number in range(num_ranks(self.scene, side))]

    def _assemble(self, side: str) -> None:
        """Tells every rank who it is; rank 0 hosts the coordinator."""
        ranks = self.sides[side]
        first = ranks[0]
        first.child.tell(self._part(first, None, 0))
        found = self._met(first)
        for rank in ranks[1:]:
            rank.child.tell(self._part(rank, found["coordinator"], found["epoch"]))
        for rank in ranks[1:]:
            self._met(rank)
        if not first.ask("await_ready"):
            raise EngineError(f"the {side} instance was not complete in time")

    def _met(self, rank: RankProcess) -> dict[str, Any]:
        found: dict[str, Any] = rank.child.told()
        rank.incarnation = found["incarnation"]
        return found

    def _part(self, rank: RankProcess, coordinator: str | None, epoch: int) -> dict[str, Any]:
        assert self.registry is not None
        other = "target" if rank.side == "source" else "source"
        return {
            "scene": msgspec.to_builtins(self.scene),
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
        """The source ranks that take part: those of dp group 0."""
        return self._group("source")

    @property
    def targets(self) -> list[RankProcess]:
        """The target ranks that take part."""
        return self._group("target")

    def _group(self, side: str) -> list[RankProcess]:
        return [self.sides[side][rank] for rank in spec_of(self.scene, side).layout.group(0)]

    def new_transfer(self) -> str:
        """An id that no transfer of this fleet had."""
        self._num_transfers += 1
        return f"transfer-{self._num_transfers}"

    def fill(self, slots: Iterable[int], salt: int = 0) -> None:
        """Writes content into the source's pages of these slots; each slot's salt differs."""
        for slot in slots:
            ask_all(self.sources, "fill", slot, self.salt(slot, salt))

    def salt(self, slot: int, salt: int = 0) -> int:
        """What the content of a slot is salted with."""
        return salt * 1_000_003 + slot

    def compare(self, slot: int = 0, salt: int = 0) -> Verdict:
        """Every byte of a slot, at every target rank."""
        found = ask_all(self.targets, "compare", slot, self.salt(slot, salt))
        return Verdict(sum(each[0] for each in found), sum(each[1] for each in found))

    def hand_over(self, pace: Pace, *, slot: int = 0, is_verified: bool = False) -> HandOver:
        """One paced transfer, as all ranks saw it."""
        order = Order(self.new_transfer(), slot, monotonic() + LEAD_S, is_verified=is_verified)
        return self.hand_over_all([order], pace)[0]

    def hand_over_all(self, orders: Sequence[Order], pace: Pace) -> list[HandOver]:
        """Transfers one after another, all at the same pace, each from its own moment on."""
        steps = schedule(self.scene, pace)
        first = self.targets[0]
        first.begin("run_series", [msgspec.to_builtins(order) for order in orders])
        for rank in self.sources:
            is_sampler = rank.rank == sampler(self.scene)
            mine = {"steps": msgspec.to_builtins(steps[rank.rank]), "is_sampler": is_sampler}
            rank.begin("run_series", [{**msgspec.to_builtins(order), **mine} for order in orders])
        received = msgspec.convert(first.answer(), list[Received])
        sent = [msgspec.convert(rank.answer(), list[Sent]) for rank in self.sources]
        incarnations = {rank.incarnation: rank.rank for rank in self.targets}
        return [
            HandOver(
                transfer=order.transfer,
                start_s=order.start_s,
                steps={rank: tuple(each) for rank, each in steps.items()},
                sent={part.rank: part for part in (each[index] for each in sent)},
                received=received[index],
                target_ranks=incarnations,
            )
            for index, order in enumerate(orders)
        ]


def ask_all(ranks: Sequence[RankProcess], method: str, *arguments: Any) -> list[Any]:
    """The same question to several ranks at once."""
    for rank in ranks:
        rank.begin(method, *arguments)
    return [rank.answer() for rank in ranks]
