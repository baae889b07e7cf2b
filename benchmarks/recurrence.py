"""The chunked forms of recurrences beside a loop over tokens, on one thread of a CPU.

    PYTHONPATH=src python benchmarks/recurrence.py FILE.json [--tokens 512] [--repeats 6]

The two take turns; each figure is the best of its runs in time of the thread, whatever else the machine does.
Both are compared with each other first. Prints a table, writes FILE.json, and exits 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from baton.bench.record import commit, machine
from baton.engine.models import delta_rule, selective_scan

SHAPES = ((16, 64), (8, 128), (32, 128))
"""Heads, and channels of each side of a head's state."""
OFF_MAX = 1e-5
Tokens = delta_rule.DeltaTokens | selective_scan.ScanTokens
Advance = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def delta_case(num_tokens: int, num_heads: int, dim: int) -> tuple[Advance, Tokens]:
    """A gated delta rule on random tokens."""
    shape = (1, num_tokens, num_heads)
    q, k, v = (torch.randn(*shape, dim) for _ in "qkv")
    log_decay, strength = -torch.rand(*shape, 1), torch.rand(*shape, 1)
    return delta_rule.advance, delta_rule.DeltaTokens(
        normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, strength
    )


def selective_case(num_tokens: int, num_heads: int, dim: int) -> tuple[Advance, Tokens]:
    """A selective state space of one group."""
    of_head = torch.zeros(num_heads, dtype=torch.int64)
    x, log_decay = torch.randn(1, num_tokens, num_heads, dim), -torch.rand(1, num_tokens, num_heads, 1)
    into, out_of = (torch.randn(1, num_tokens, 1, dim) for _ in "BC")

    def advance(tokens: selective_scan.ScanTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan.advance(tokens, of_head, state)

    return advance, selective_scan.ScanTokens(x, log_decay, into, out_of)


def by_token(advance: Advance, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    outs = []
    for index in range(tokens[0].shape[1]):
        out, state = advance(type(tokens)(*(each[:, index : index + 1] for each in tokens)), state)
        outs.append(out)
    return torch.cat(outs, dim=1), state


def timed_s(run: Callable[[], object]) -> float:
    """Of this thread."""
    start_s = thread_time()
    run()
    return thread_time() - start_s


def measure(name: str, shape: tuple[int, int], num_tokens: int, repeats: int) -> dict[str, Any]:
    """One recurrence in one shape."""
    advance, tokens = {"delta": delta_case, "selective": selective_case}[name](num_tokens, *shape)
    state = torch.randn(1, shape[0], shape[1], shape[1])
    loop, chunked = partial(by_token, advance, tokens, state), partial(advance, tokens, state)
    pairs = zip(loop(), chunked(), strict=True)
    off = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    loop_s, chunked_s = [], []
    for _ in range(repeats):
        loop_s.append(timed_s(loop))
        chunked_s += [timed_s(chunked) for _ in range(4)]
    found = {"recurrence": name, "heads": shape[0], "channels": shape[1], "tokens": num_tokens}
    times = {"loop_s": min(loop_s), "chunked_s": min(chunked_s), "times": min(loop_s) / min(chunked_s)}
    return {**found, **times, "off": off}


def main() -> int:
    """Measures, writes the record, and says by its status whether both forms agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for name in ("delta", "selective"):
            for shape in SHAPES:
                found = measure(name, shape, arguments.tokens, arguments.repeats)
                results.append(found)
                times = f"{found['loop_s'] * 1e3:7.1f} ms, chunked {found['chunked_s'] * 1e3:6.2f} ms"
                print(f"{name:9} {shape[0]:3} x {shape[1]:3}: token loop {times}, {found['times']:.2f} times")
    words = ["benchmarks/recurrence.py", f"--tokens {arguments.tokens}", f"--repeats {arguments.repeats}"]
    about = machine() | {"torch": torch.__version__, "threads": 1}
    record = {"command": " ".join(words), "commit": commit(), "machine": about, "results": results}
    arguments.path.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(found["off"] < OFF_MAX for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
