"""cuda_ipc between two processes on one GPU, beside a plain device-to-device copy of as many bytes.

    PYTHONPATH=src python benchmarks/cuda_ipc_gpu.py OUT.json [--repeats 7]

A case is a batch of equal spans at shuffled places of 1 GiB. Three rates are taken, each beside a plain copy
(one cuMemcpyAsync by torch, contiguous, inside one process) that is measured the same way in turns with it:

    device      what the stream needs: events around many batches that the device works off without a gap
    pipelined   from the first submit to the last Done of 32 batches, all submitted at once
    single      from one submit to its Done; the plain copy with a synchronisation

Every byte of the target is compared after each case. Prints a table, writes JSON, exits 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.bench.record import commit, machine
from baton.plan.steps import Spans
from baton.transport import NOW, Batch, CudaFence, Done, Ranges, open_transport, wait_for_events
from baton.transport.common.regions import memory_of
from baton.transport.common.spans import coalesce
from baton.transport.cuda_ipc.device import CudaMemory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
REGION_BYTES = GIB
CASES = ((64 * KIB, 256), (4 * KIB, 1024), (MIB, 64))
NUM_BATCHES = 32
TARGET_RATIO = 0.8


def content(seed: int) -> torch.Tensor:
    """Random bytes that both processes can make."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (REGION_BYTES,), dtype=torch.uint8, device="cuda", generator=generator)


def shuffled(span_bytes: int, num_spans: int) -> Spans:
    """Equal spans at random multiples of their length."""
    rng = np.random.default_rng(num_spans)
    at, to = (rng.permutation(REGION_BYTES // span_bytes)[:num_spans].astype(np.int64) for _ in range(2))
    return Spans(at * span_bytes, to * span_bytes, np.full(num_spans, span_bytes, dtype=np.int64))


class Target:
    """The process that owns the memory, driven over a pipe."""

    def __init__(self) -> None:
        self.transport = open_transport("cuda_ipc")
        # A slice of a larger tensor: its offset in the allocation has to be right.
        self.pool = torch.zeros(REGION_BYTES + 64 * MIB, dtype=torch.uint8, device="cuda")
        self.pool = self.pool[32 * MIB : 32 * MIB + REGION_BYTES]
        self.region = self.transport.register(self.pool)
        torch.cuda.synchronize()

    def invite(self) -> tuple[Any, Any]:
        invitation = self.transport.invite()
        self.transport.grant(invitation.peer, self.region, Ranges.whole(self.region))
        return invitation.description, self.region.remote

    def check(self, span_bytes: int, num_spans: int) -> bool:
        """Whether every span is here, and nothing beside it; clears the pool."""
        spans = shuffled(span_bytes, num_spans)
        expected = torch.zeros(REGION_BYTES // span_bytes, span_bytes, dtype=torch.uint8, device="cuda")
        at, to = (torch.from_numpy(each // span_bytes).cuda() for each in (spans.source, spans.target))
        expected[to] = content(1).view(-1, span_bytes)[at]
        is_same = bool(torch.equal(expected.view(-1), self.pool))
        self.pool.zero_()
        torch.cuda.synchronize()
        return is_same


def serve(pipe: Connection) -> None:
    target = Target()
    while (asked := pipe.recv()) is not None:
        method, *args = asked
        pipe.send(getattr(target, method)(*args))
    target.transport.close()


class Source:
    """This process."""

    def __init__(self, description: Any, remote: Any) -> None:
        self.transport = open_transport("cuda_ipc")
        self.data = content(1)
        self.region = self.transport.register(self.data)
        self.peer, self.remote = self.transport.connect(description), remote
        self.scratch = torch.zeros(REGION_BYTES, dtype=torch.uint8, device="cuda")
        self.memory = CudaMemory()
        self.stream = self.memory.open_stream(memory_of(self.data))
        torch.cuda.synchronize()

    def send(self, spans: Spans, num_batches: int) -> float:
        """Seconds from the first submit to the last Done."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        fence = CudaFence(event) if num_batches > 1 else NOW
        begun_s = time.perf_counter()
        for _ in range(num_batches):
            self.transport.submit(self.peer, Batch(self.region, self.remote, spans), fence)
        while num_batches:
            for ended in wait_for_events(self.transport, 10.0):
                assert isinstance(ended, Done), ended
                num_batches -= 1
        return time.perf_counter() - begun_s

    def copy_plain(self, num_bytes: int, num_batches: int) -> float:
        """Seconds of contiguous copies, one behind the other."""
        begun_s = time.perf_counter()
        for _ in range(num_batches):
            self.scratch[:num_bytes].copy_(self.data[:num_bytes])
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begun_s

    def device_seconds(self, start: Callable[[], None], stream: Any) -> float:
        """What a device needs for one `start`: it works off a queue that was filled while it slept."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
            begin.record(stream)
            for _ in range(NUM_BATCHES):
                start()
            end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / NUM_BATCHES

    def device_copy(self, spans: Spans) -> float:
        """The transport's own stream and copies, inside this process."""
        joined, address = coalesce(spans), (self.data.data_ptr(), self.scratch.data_ptr())

        def start() -> None:
            self.stream.copy(joined, *address)

        taken_s = self.device_seconds(start, self.stream._stream)
        self.stream.record(is_blocking=False).synchronize()
        return taken_s

    def device_plain(self, num_bytes: int) -> float:
        def start() -> None:
            self.scratch[:num_bytes].copy_(self.data[:num_bytes])

        return self.device_seconds(start, torch.cuda.Stream())


def measure(source: Source, spans: Spans, repeats: int) -> dict[str, dict[str, float]]:
    num_bytes = spans.num_bytes
    works: dict[str, tuple[Callable[[], float], Callable[[], float], int]] = {
        "device": (lambda: source.device_copy(spans), lambda: source.device_plain(num_bytes), 1),
        "pipelined": (
            lambda: source.send(spans, NUM_BATCHES),
            lambda: source.copy_plain(num_bytes, NUM_BATCHES),
            NUM_BATCHES,
        ),
        "single": (lambda: source.send(spans, 1), lambda: source.copy_plain(num_bytes, 1), 1),
    }
    figures = {}
    for name, (ours, plain, num_batches) in works.items():
        ours(), plain()
        taken = [(ours(), plain()) for _ in range(repeats)]
        ours_s, plain_s = (median(column) / num_batches for column in zip(*taken, strict=True))
        figures[name] = {
            "us": round(ours_s * 1e6, 1),
            "plain_us": round(plain_s * 1e6, 1),
            "GB_per_s": round(num_bytes / ours_s / 1e9, 1),
            "plain_GB_per_s": round(num_bytes / plain_s / 1e9, 1),
            "ratio": round(plain_s / ours_s, 3),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,), daemon=True)
    child.start()

    def call(*words: Any) -> Any:
        pipe.send(words)
        if not pipe.poll(120):
            raise TimeoutError("the target process does not answer")
        return pipe.recv()

    source = Source(*call("invite"))
    cases, is_same = {}, True
    for span_bytes, num_spans in CASES:
        name = f"{span_bytes // KIB} KiB x {num_spans}"
        cases[name] = measure(source, shuffled(span_bytes, num_spans), asked.repeats)
        is_case_same = call("check", span_bytes, num_spans)
        is_same &= is_case_same
        for way, figures in cases[name].items():
            print(
                f"{name:16} {way:10} {figures['GB_per_s']:8.1f} GB/s {figures['us']:8.1f} us, "
                f"plain {figures['plain_GB_per_s']:8.1f} GB/s {figures['plain_us']:8.1f} us: "
                f"{figures['ratio']:.2f}{'' if is_case_same else ' BYTES DIFFER'}",
                flush=True,
            )
    record = {"machine": machine(), "commit": commit(), "gpu": torch.cuda.get_device_name()}
    record |= {"torch": torch.__version__, "num_batches": NUM_BATCHES, "target_ratio": TARGET_RATIO}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({**record, "is_same": is_same, "cases": cases}, indent=1) + "\n")
    pipe.send(None)
    source.transport.close()
    child.join(10)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
