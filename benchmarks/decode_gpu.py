"""The time of a decode step on a GPU against the memory bound: weights and KV cache read once.

python benchmarks/decode_gpu.py [--model dummy:benchmarks/llama-8b.json] [--context 1024] [--out FILE]
One rank in this process: the model runner and the sampler, without scheduler and HTTP. Steps with the general
pass, with paged kernels launched one by one, and as CUDA graphs, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence, StartSequence
from baton.engine.model_runner import (
    ModelRunner,
    open_decoding,
    sample_tokens,
    why_not_captured,
    why_not_paged,
)
from baton.engine.models.build import build, describe
from baton.engine.pages import engine_storage
from baton.engine.parallel import Mesh
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.plan import Spec, parse_layout
from baton.plan.models.config import read_cache
from baton.plan.ownership import buffers

PAGE = 64
CUDA = torch.device("cuda")


class NoHooks:
    """Nothing is handed over."""

    def before_forward(self, batch: ScheduledBatch) -> None:
        pass

    def layer_done(self, layer: int) -> None:
        pass

    def after_forward(self) -> None:
        pass


def copy_bytes_per_s() -> float:
    """What this GPU's memory reads and writes per second, by the fastest copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start_s)
    return 2 * source.numel() / best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="dummy:benchmarks/llama-8b.json")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = [int(part) for part in args.batches.split(",")]
    rows_max, context_max = max(sizes), args.context + 512
    speed = copy_bytes_per_s()
    torch.cuda.empty_cache()
    start_s = time.perf_counter()
    checkpoint = open_checkpoint(args.model)
    cache = read_cache(checkpoint.config, args.model)
    mesh = Mesh(parse_layout("tp1"), 0)
    num_pages = rows_max * -(-context_max // PAGE)
    spec = Spec(mesh.layout, cache, replace(engine_storage(cache, PAGE, "bf16"), num_pages_default=num_pages))
    content = {
        name: torch.zeros(size, dtype=torch.uint8, device=CUDA)
        for name, size in buffers(spec, 0, "bench").items()
    }
    pools = CachePools(spec, 0, content, CUDA)
    before = torch.cuda.memory_allocated()
    stage = build(checkpoint, mesh.cut(cache.num_layers, torch.bfloat16, CUDA), max_context=context_max)
    weight_bytes = torch.cuda.memory_allocated() - before
    load_s, start_s = time.perf_counter() - start_s, time.perf_counter()
    reason = why_not_paged(stage, mesh, pools)
    if reason:
        raise SystemExit(f"{args.model}: {reason}")
    eager, graphs = (open_decoding(pools, rows_max, context_max) for _ in range(2))
    runners = {
        "general": ModelRunner(stage, mesh, pools),
        "paged": ModelRunner(stage, mesh, pools, eager),
        "graphs": ModelRunner(stage, mesh, pools, graphs),
    }
    if why := why_not_captured(mesh, describe(checkpoint.config).num_experts):
        print(f"not captured: {why}")
        del runners["graphs"]
    else:
        runners["graphs"].capture()
    capture_s = time.perf_counter() - start_s
    vocab_size = checkpoint.config["vocab_size"]
    pool_bytes = sum(tensor.numel() for tensor in content.values())
    token_bytes = pool_bytes / (num_pages * PAGE)
    results: list[dict[str, Any]] = []
    for num_rows in sizes:
        sampler = Sampler(vocab_size, ())
        for number in range(num_rows):
            sampler.begin(StartSequence(number, 0, [1] * args.context, args.context, SamplingParams()))
        taken: dict[str, list[float]] = {name: [] for name in runners}
        position = args.context
        for turn in range(args.steps):
            for name, runner in runners.items():
                works = [
                    ScheduledSequence(
                        number, position, [(number * 31 + position) % vocab_size],
                        {
                            group: [number + i * rows_max for i in range(-(-context_max // PAGE))]
                            for group in cache.groups
                        },
                        args.context, 1,
                    )
                    for number in range(num_rows)
                ]  # fmt: skip
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                logits = runner.run([ScheduledBatch(works)], NoHooks())
                assert logits is not None
                sample_tokens(sampler, logits, works)
                if turn >= 3:
                    taken[name].append(time.perf_counter() - start_s)
                position += 1
        bound_s = (weight_bytes + num_rows * token_bytes * args.context) / speed
        row: dict[str, Any] = {"sequences": num_rows, "bound_ms": round(bound_s * 1e3, 3)}
        for name, times in taken.items():
            median_s = statistics.median(times)
            row[name] = {"ms": round(median_s * 1e3, 3), "of_bound": round(bound_s / median_s, 3)}
        print(row, flush=True)
        results.append(row)
    record = {
        "command": f"python benchmarks/decode_gpu.py --model {args.model} --context {args.context}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "memory_bytes_per_s": speed,
        "weight_bytes": weight_bytes,
        "load_s": round(load_s, 2),
        "capture_s": round(capture_s, 2),
        "results": results,
    }
    print(json.dumps(record)[:300])
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


if __name__ == "__main__":
    main()
