"""Packing bandwidth beside a plain copy of as many bytes, on a GPU where there is one.

    PYTHONPATH=src python benchmarks/packing_gpu.py FOLDER [--device cpu] [--layers 8] [--repeats 20]

A case is one pair of ranks of a real model, all components of one group of layers. Its Pack and its Unpack
are each timed, taking turns with a contiguous copy_ that reads and writes as many bytes in the same memory,
by events on a GPU and by the clock on a host; the figure is the ratio of the two, 1.00 being as fast.
Every case is first run once from end to end and compared with baton.plan.content byte for byte, on a
stream other than the one that it was prepared on, with torch set to fail where the host would wait. Prints a
table, writes FOLDER/packing-DEVICE.json, and exits 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from baton.bench.record import commit, machine
from baton.plan.binding import bind
from baton.plan.cache import Cache
from baton.plan.chunks import Tables
from baton.plan.content import Memory, execute
from baton.plan.dtypes import convert, item_bytes
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec, buffers
from baton.plan.planner import plan
from baton.plan.report import pages_needed
from baton.plan.routes import Chunk, Prompt
from baton.plan.steps import ALWAYS_PACK, Copy, Pack, Step, Unpack
from baton.plan.storage import parse_storage
from baton.transport.packing import prepare

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """A hand-over of which one pair of ranks is measured."""

    model: str
    source: str
    target: str
    storage: str = "nhd"
    dtypes: tuple[str, str] = ("bf16", "bf16")
    is_shuffled: bool = True

    @property
    def name(self) -> str:
        """The case in a few words."""
        dtypes = "->".join(self.dtypes) if self.dtypes[0] != self.dtypes[1] else self.dtypes[0]
        pages = "pages shuffled" if self.is_shuffled else "pages in order"
        return f"{self.model} {self.source}->{self.target} {self.storage} {dtypes}, {pages}"


CASES = [
    Case("llama-3-70b", "tp4", "tp2"),
    Case("llama-3-70b", "tp4", "tp2", is_shuffled=False),
    Case("llama-3-70b", "tp2", "tp4"),
    Case("llama-3-70b", "tp2", "tp4", is_shuffled=False),
    Case("llama-3-70b", "tp4", "tp2", "hnd"),
    Case("deepseek-v3", "tp1", "cp2:stripe1"),
    Case("deepseek-v3", "tp1", "cp2:stripe1", is_shuffled=False),
    Case("deepseek-v3", "cp4:stripe1", "cp2:stripe1"),
    Case("llama-3-70b", "tp4", "tp2", dtypes=("bf16", "fp32")),
    Case("llama-3-70b", "tp4", "tp2", dtypes=("bf16", "fp8")),
    Case("llama-3-70b", "tp4", "tp2", dtypes=("bf16", "fp8"), is_shuffled=False),
    Case("llama-3-70b", "tp4", "tp2", dtypes=("fp8", "bf16")),
]


@dataclass(frozen=True)
class Work:
    """The steps of one pair of ranks and the memory of both, as numpy has it."""

    steps: list[Step]
    source: Memory
    target: Memory

    @property
    def staging_bytes(self) -> int:
        """How much staging the pair needs."""
        return max(step.spans.num_bytes for step in self.steps if isinstance(step, Copy))


def make_work(case: Case, num_tokens: int, num_layers: int) -> Work:
    """The steps of the first pair of ranks that exchange anything, and random numbers for them to move."""
    prompt, rng = Prompt(num_tokens), np.random.default_rng(0)
    specs = []
    for text, dtype in zip((case.source, case.target), case.dtypes, strict=True):
        cache = load_cache(case.model)
        layers = ((0, num_layers),)
        cache = Cache(num_layers, tuple(replace(part, layers=layers) for part in cache.components))
        bare = Spec(parse_layout(text), cache, parse_storage(case.storage, PAGE_TOKENS, dtype))
        specs.append(replace(bare, storage=bare.storage.with_pages(pages_needed(bare, prompt))))
    tables = Tables(*(_tables(spec, prompt, rng if case.is_shuffled else None) for spec in specs))
    bound = bind(plan(*specs), prompt, tables, Chunk((0, num_layers), (0, num_tokens)), ALWAYS_PACK)
    pair = (bound[0].source, bound[0].target)
    steps = [step for step in bound if (step.source, step.target) == pair]
    memories: list[Memory] = []
    for spec, rank, side in zip(specs, pair, ("source", "target"), strict=True):
        memories.append(
            {(rank, name): np.zeros(n, np.uint8) for name, n in buffers(spec, rank, side).items()}
        )
    for buffer in memories[0].values():
        numbers = rng.standard_normal(len(buffer) // item_bytes(case.dtypes[0]), dtype=np.float32)
        buffer[:] = convert(numbers.view(np.uint8), "fp32", case.dtypes[0])
    return Work(steps, memories[0], memories[1])


def _tables(spec: Spec, prompt: Prompt, rng: np.random.Generator | None) -> dict[int, dict[str, np.ndarray]]:
    """Page ids for every rank: any of the pool's, or the first ones in order."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for rank in spec.layout.group(0):
        counts = pages_needed(spec, prompt)
        found[rank] = {
            group: np.arange(count, dtype=np.int64) if rng is None else rng.permutation(count)
            for group, count in counts.items()
        }
    return found


class Bench:
    """One case on a device: its buffers there, and its steps made ready."""

    def __init__(self, case: Case, work: Work, device: torch.device) -> None:
        self.case, self.work, self.device = case, work, device
        self.source = {key: torch.from_numpy(buffer).to(device) for key, buffer in work.source.items()}
        self.target = {key: torch.from_numpy(buffer.copy()).to(device) for key, buffer in work.target.items()}
        self.staging = torch.zeros(work.staging_bytes, dtype=torch.uint8, device=device)
        self.seconds_to_prepare = 0.0
        self.works = {"pack": self._pack_runs(), "unpack": self._unpack_runs()}

    def _pack_runs(self) -> list[Callable[[], None]]:
        return [self._timed(self._make_pack, step) for step in self.work.steps if isinstance(step, Pack)]

    def _unpack_runs(self) -> list[Callable[[], None]]:
        return [self._timed(self._make_unpack, step) for step in self.work.steps if isinstance(step, Unpack)]

    def _timed(self, make: Callable[[Any], Callable[[], None]], step: Step) -> Callable[[], None]:
        start = perf_counter()
        found = make(step)
        self.seconds_to_prepare += perf_counter() - start
        return found

    def _make_pack(self, step: Pack) -> Callable[[], None]:
        prepared, buffer = prepare(step, self.device), self.source[step.source, step.buffer]
        return lambda: prepared.run(buffer, self.staging)

    def _make_unpack(self, step: Unpack) -> Callable[[], None]:
        buffer = self.target[step.target, step.buffer]
        prepared = prepare(step, self.device)
        return lambda: prepared.run(self.staging, buffer)

    def run(self, name: str) -> None:
        """All steps of one name, once."""
        for work in self.works[name]:
            work()

    def is_right(self) -> bool:
        """Runs the case once on another stream and compares with the reference."""
        if self.device.type == "cuda":
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(side):
                self._run_all()
            torch.cuda.set_sync_debug_mode("default")
            side.synchronize()
        else:
            self._run_all()
        expected = {key: buffer.copy() for key, buffer in self.work.target.items()}
        execute(self.work.steps, self.work.source, expected)
        return all(np.array_equal(expected[key], found.cpu().numpy()) for key, found in self.target.items())

    def _run_all(self) -> None:
        self.run("pack")
        self.run("unpack")

    def measure(self, name: str, repeats: int) -> dict[str, float]:
        """Seconds of the steps of one name and of a copy that touches as many bytes."""
        steps = [step for step in self.work.steps if type(step).__name__.lower() == name]
        num_bytes = sum(bytes_touched(step) for step in steps)
        given, taken = (torch.zeros(num_bytes // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
        works = (lambda: self.run(name), lambda: taken.copy_(given))
        times: list[list[float]] = [[], []]
        for turn in range(repeats + 2):
            for work, found in zip(works, times, strict=True):
                took = seconds(work, self.device)
                if turn >= 2:
                    found.append(took)
        ours_s, copy_s = (median(found) for found in times)
        host_s = median([host_seconds(works[0], self.device) for _ in range(5)])
        return {
            "bytes_in_and_out": num_bytes,
            "num_spans": sum(len(step.spans) for step in steps),
            "median_s": ours_s,
            "copy_median_s": copy_s,
            "bytes_per_s": num_bytes / ours_s,
            "ratio_to_copy": copy_s / ours_s,
            "host_s": host_s,
        }


def bytes_touched(step: Step) -> int:
    """Bytes that a step reads and writes."""
    read = step.spans.num_bytes
    if not isinstance(step, Unpack):
        return 2 * read
    return read + read // item_bytes(step.dtypes[0]) * item_bytes(step.dtypes[1])


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the device works."""
    if device.type != "cuda":
        return host_seconds(work, device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # What comes before the first event keeps the device busy while the host sends the rest.
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def host_seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the host is busy sending the work; on a host, doing it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    work()
    return perf_counter() - start


def run(cases: list[Case], arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Every case in turn: checked, then measured."""
    device = torch.device(arguments.device)
    for case in cases:
        bench = Bench(case, make_work(case, arguments.tokens, arguments.layers), device)
        is_right = bench.is_right()
        figures = {name: bench.measure(name, arguments.repeats) for name in bench.works}
        print(f"{case.name}: {'bytes right' if is_right else 'BYTES DIFFER'}")
        for name, found in figures.items():
            print(
                f"  {name:6}  {found['num_spans']:>7.0f} spans  "
                f"{found['bytes_in_and_out'] / 2**20:>6.0f} MiB  "
                f"{found['median_s'] * 1e3:>8.3f} ms  {found['bytes_per_s'] / 1e9:>7.1f} GB/s  "
                f"copy {found['copy_median_s'] * 1e3:>8.3f} ms  ratio {found['ratio_to_copy']:.2f}  "
                f"host {found['host_s'] * 1e6:.0f} us"
            )
        print(f"  prepare {bench.seconds_to_prepare * 1e3:.1f} ms", flush=True)
        yield {
            "case": asdict(case),
            "is_right": is_right,
            "prepare_s": bench.seconds_to_prepare,
            **figures,
        }


def main() -> int:
    """Measures, writes the record, and says by its status whether every byte was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    results = list(run(CASES, arguments))
    is_cuda = arguments.device.startswith("cuda")
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if is_cuda else f"cpu, {torch.get_num_threads()} threads",
    }
    record = {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "machine": machine() | about,
        "results": results,
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"packing-{'cuda' if is_cuda else 'cpu'}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}")
    return 0 if all(result["is_right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
