"""Staged shm between two processes on one GPU, beside the pinned copy rates of the same run.

    PYTHONPATH=src python benchmarks/shm_gpu.py FOLDER [--slot-mib 32] [--slots 4] [--repeats 5]

Two processes each hold a source and a target region of 1 GiB on the GPU and a connection to the other. A case
is a batch of equal spans at shuffled places, sent several times over, by one process or by both at once; the
figure is the sum of what both sent over the time from the first submission to the last Done. All of it
crosses the one bus of the GPU twice, so the rate to compare with is that of a pinned copy while one the other
way runs. Every byte of the last round is compared. Prints a table, writes FOLDER/shm-gpu-SLOTS.json, exits
1 if a byte differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.bench.record import commit, machine
from baton.plan.steps import Spans
from baton.transport import Batch, Done, Ranges, open_transport, wait_for_events
from baton.transport.fences import CudaFence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
REGION_BYTES = GIB
PINNED_BYTES = 256 * MIB
CASES = ((64 * KIB, 4096), (MIB, 256))
ROUND_BATCHES = 12
TARGET_RATIO = 0.85


@dataclass(frozen=True)
class Row:
    """One measured line; rates in GB/s."""

    name: str
    rate: float
    ratio: float


class End:
    """One of the two processes, driven over a pipe."""

    def __init__(self, seed: int, options: dict[str, int]) -> None:
        self.device = torch.device("cuda:0")
        self.seed = seed
        self.transport = open_transport("shm", **options)
        self.source = content(seed, self.device)
        self.target = torch.zeros(REGION_BYTES, dtype=torch.uint8, device=self.device)
        self.source_region = self.transport.register(self.source)
        self.target_region = self.transport.register(self.target)
        self.peer: Any = None
        self.remote: Any = None

    def invite(self) -> tuple[Any, Any]:
        """What the other end needs to write here."""
        invitation = self.transport.invite()
        self.transport.grant(invitation.peer, self.target_region, Ranges.whole(self.target_region))
        return invitation.description, self.target_region.remote

    def join(self, description: Any, remote: Any) -> None:
        """Connects to the other end."""
        self.peer, self.remote = self.transport.connect(description), remote

    def send(self, span_bytes: int, num_spans: int, num_batches: int) -> tuple[float, float]:
        """Sends a round; answers when it began and when it was Done."""
        spans = shuffled(span_bytes, num_spans, self.seed)
        event = torch.cuda.Event(blocking=True)
        event.record()
        begun_s = time.monotonic()
        for _ in range(num_batches):
            self.transport.submit(self.peer, Batch(self.source_region, self.remote, spans), CudaFence(event))
        num_ended = 0
        while num_ended < num_batches:
            for ended in wait_for_events(self.transport, 10.0):
                assert isinstance(ended, Done), ended
                num_ended += isinstance(ended, Done)
        return begun_s, time.monotonic()

    def check(self, span_bytes: int, num_spans: int, seed: int) -> bool:
        """Whether every span of the other end's round is here, and nothing beside it."""
        spans = shuffled(span_bytes, num_spans, seed)
        expected = torch.zeros(REGION_BYTES // span_bytes, span_bytes, dtype=torch.uint8, device=self.device)
        at, to = (
            torch.from_numpy(offsets // span_bytes).to(self.device)
            for offsets in (spans.source, spans.target)
        )
        expected[to] = content(seed, self.device).view(-1, span_bytes)[at]
        is_same = bool(torch.equal(expected.view(-1), self.target))
        self.target.zero_()
        torch.cuda.current_stream().synchronize()
        return is_same

    def pinned(self, directions: str, seconds: float) -> dict[str, float]:
        """Rates of pinned copies, those of several directions at once."""
        host = {each: torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for each in directions}
        streams = {each: torch.cuda.Stream() for each in directions}
        counts, ends = dict.fromkeys(directions, 0), dict.fromkeys(directions, 0.0)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + seconds:
            for each in directions:
                near, far = (
                    host[each],
                    self.source[:PINNED_BYTES] if each == "d" else self.target[:PINNED_BYTES],
                )
                with torch.cuda.stream(streams[each]):
                    (near if each == "d" else far).copy_(far if each == "d" else near, non_blocking=True)
                counts[each] += 1
            if counts[directions[0]] % 4 == 0:
                for each in directions:
                    streams[each].synchronize()
                    ends[each] = time.monotonic()
        for each in directions:
            streams[each].synchronize()
            ends[each] = time.monotonic()
        return {each: counts[each] * PINNED_BYTES / (ends[each] - begun_s) / 1e9 for each in directions}

    def clear(self) -> None:
        """Empties the target after rates were measured into it."""
        self.target.zero_()
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Ends the transport."""
        self.transport.close()


def content(seed: int, device: torch.device) -> torch.Tensor:
    """Random bytes that both processes can make."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (REGION_BYTES,), dtype=torch.uint8, device=device, generator=generator)


def shuffled(span_bytes: int, num_spans: int, seed: int) -> Spans:
    """Equal spans at random multiples of their length."""
    rng = np.random.default_rng(seed)
    at, to = (rng.permutation(REGION_BYTES // span_bytes)[:num_spans].astype(np.int64) for _ in range(2))
    return Spans(at * span_bytes, to * span_bytes, np.full(num_spans, span_bytes, dtype=np.int64))


def serve(pipe: Connection, seed: int, options: dict[str, int]) -> None:
    """The other process."""
    end = End(seed, options)
    while (asked := pipe.recv()) is not None:
        method, *args = asked
        pipe.send(getattr(end, method)(*args))
    end.close()


class Far:
    """The other process as this one calls it."""

    def __init__(self, seed: int, options: dict[str, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.child = context.Process(target=serve, args=(theirs, seed, options), daemon=True)
        self.child.start()

    def begin(self, *asked: Any) -> None:
        """Starts a call."""
        self.pipe.send(asked)

    def answer(self) -> Any:
        """What the call began last said."""
        if not self.pipe.poll(60):
            raise TimeoutError("the other process says nothing")
        return self.pipe.recv()

    def call(self, *asked: Any) -> Any:
        """A call and its answer."""
        self.begin(*asked)
        return self.answer()


def measure_case(near: End, far: Far, case: tuple[int, int], repeats: int) -> tuple[list[Row], bool]:
    """One case, in one direction and in both at once."""
    span_bytes, num_spans = case
    name = f"{span_bytes >> 10} KiB x {num_spans}"
    num_bytes = span_bytes * num_spans * ROUND_BATCHES
    near.send(*case, 2)
    far.call("send", *case, 2)
    one, both = [], []
    for _ in range(repeats):
        begun_s, ended_s = near.send(*case, ROUND_BATCHES)
        one.append(num_bytes / (ended_s - begun_s) / 1e9)
        far.begin("send", *case, ROUND_BATCHES)
        ours, theirs = near.send(*case, ROUND_BATCHES), far.answer()
        both.append(2 * num_bytes / (max(ours[1], theirs[1]) - min(ours[0], theirs[0])) / 1e9)
    is_same = far.call("check", *case, near.seed) and near.check(*case, 2)
    return [Row(f"{name}, one way", median(one), 0.0), Row(f"{name}, both ways", median(both), 0.0)], is_same


def measure_pinned(near: End, far: Far) -> tuple[list[Row], float]:
    """Pinned copies alone, both at once in one process, and one in each; the last is what shm does."""
    alone = {each: near.pinned(each, 0.3)[each] for each in "dh"}
    overlapped = near.pinned("dh", 0.5)
    far.begin("pinned", "h", 0.5)
    apart = {"d": near.pinned("d", 0.5)["d"], "h": far.answer()["h"]}
    rows = [Row(f"pinned {way}, alone", alone[way[0].lower()], 0.0) for way in ("D2H", "H2D")]
    rows += [Row(f"pinned {way}, overlapped", overlapped[way[0].lower()], 0.0) for way in ("D2H", "H2D")]
    rows += [
        Row(f"pinned {way}, the other process the other way", apart[way[0].lower()], 0.0)
        for way in ("D2H", "H2D")
    ]
    near.clear()
    far.call("clear")
    return rows, min(overlapped.values())


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slot-mib", type=int, default=32)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    options = {"slot_bytes": asked.slot_mib * MIB, "num_slots": asked.slots}
    far, near = Far(2, options), End(1, options)
    far.call("join", *near.invite())
    near.join(*far.call("invite"))
    rows, reference = measure_pinned(near, far)
    is_same = True
    for case in CASES:
        found, is_case_same = measure_case(near, far, case, asked.repeats)
        rows += found
        is_same &= is_case_same
    again, _ = measure_pinned(near, far)
    rows += [Row(f"{row.name} (again)", row.rate, 0.0) for row in again]
    rows = [Row(row.name, round(row.rate, 2), round(row.rate / reference, 3)) for row in rows]
    verdict = "same" if is_same else "DIFFER"
    print(f"{asked.slots} slots of {asked.slot_mib} MiB; 1.00 is {reference:.1f} GB/s; bytes {verdict}")
    for row in rows:
        print(f"{row.name:55} {row.rate:8.2f} GB/s {row.ratio:6.2f}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    told = {
        "machine": machine(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    told |= {
        **options,
        "is_same": is_same,
        "target_ratio": TARGET_RATIO,
        "rows": [asdict(row) for row in rows],
    }
    name = f"shm-gpu-{asked.slots}x{asked.slot_mib}.json"
    (asked.folder / name).write_text(json.dumps(told, indent=1) + "\n")
    far.pipe.send(None)
    near.close()
    far.child.join(10)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
