"""What a layer costs the thread of a vLLM worker that hands it over: python benchmarks/vllm_layers.py

`WorkerSide.layer_done`, one group per layer, for the prompts of a step: processor time of the calling thread.
Two endpoints of one rank each in this process, over tcp; every prompt is granted before it is computed and
arrives. 80 layers, blocks of 16 tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from types import SimpleNamespace

import torch

from baton.adapters.common import WorkerMesh
from baton.adapters.vllm.cache import describe_layers, make_pools, make_spec
from baton.adapters.vllm.metadata import CachedChunk, Load, Queue, StepMetadata, Transfer
from baton.adapters.vllm.worker import WorkerSide
from baton.session import Endpoint, EndpointConfig, Timings, prompt_digest
from baton.transport import NOW, open_transport

LAYERS, BLOCKS, TOKENS, CHANNELS = 80, 160, 16, 256
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
STEPS = 25
STEP_S_MAX = 300.0


def start(name: str) -> WorkerSide:
    cache = torch.zeros(LAYERS, BLOCKS, 1, TOKENS, CHANNELS, dtype=torch.bfloat16)
    caches = dict(zip(NAMES, cache.unbind(0), strict=True))
    group = SimpleNamespace(layer_names=NAMES, kv_cache_spec=type("FullAttentionSpec", (), {})())
    layers = describe_layers(caches, [group], BLOCKS)
    spec = make_spec([layers], WorkerMesh(0, 0, 1, 1, 1))
    timings = Timings(silence_s=STEP_S_MAX, progress_s=STEP_S_MAX, copy_s=STEP_S_MAX)
    secret = b"a secret of the benchmark"
    config = EndpointConfig(instance=name, spec=spec, rank=0, secret=secret, timings=timings)
    endpoint = Endpoint(config, make_pools(caches), open_transport("tcp"))
    assert endpoint.wait_ready(STEP_S_MAX)
    return WorkerSide(endpoint, layers, (0,), fence=lambda: NOW)


def run_step(prefill: WorkerSide, decode: WorkerSide, number: int, prompts: int, tokens: int) -> list[int]:
    """Nanoseconds of each layer."""
    per_prompt = tokens // TOKENS
    transfers = {
        f"{prompts}x{tokens}-{number}-{i}": [*range(i * per_prompt, (i + 1) * per_prompt)]
        for i in range(prompts)
    }
    digest = prompt_digest(range(tokens)).value
    known = {name: Transfer(name, tokens, digest) for name in transfers}
    prefill.begin_step(StepMetadata(queued=[Queue(name, known[name]) for name in transfers]))
    address = prefill.endpoint.address
    loads = [Load(name, known[name], address, 0, (blocks,)) for name, blocks in transfers.items()]
    decode.begin_step(StepMetadata(loads=loads))
    limit_s = time.monotonic() + STEP_S_MAX
    while not all(prefill._outgoing[name].sending.is_granted for name in transfers):
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    chunks = [CachedChunk(name, known[name], (0, tokens), (blocks,)) for name, blocks in transfers.items()]
    prefill.begin_step(StepMetadata(chunks=chunks))
    spent = []
    for name in NAMES:
        began = time.thread_time_ns()
        prefill.layer_done(name)
        spent.append(time.thread_time_ns() - began)
    prefill.end_step()
    arrived: set[str] = set()
    ended = sent = set(transfers)
    while arrived != set(transfers) or sent:
        assert time.monotonic() < limit_s
        results = decode.take_results(set(), is_idle=True)
        assert not results.failed
        arrived |= results.received
        sent = sent - prefill.take_results(ended, is_idle=True).sent
        ended = set()
    return spent


def main() -> None:
    prefill, decode = start("prefill"), start("decode")
    rows = []
    for prompts, tokens in ((1, 256), (1, 2048), (8, 256)):
        every = [run_step(prefill, decode, number, prompts, tokens) for number in range(STEPS)]
        each = sorted(spent / 1000 for step in every[1:] for spent in step)  # the first one plans
        row = {
            "prompts": prompts,
            "tokens": tokens,
            "median_us": round(statistics.median(each), 1),
            "p99_us": round(each[len(each) * 99 // 100], 1),
        }
        rows.append(row)
        print(
            f"{prompts} x {tokens} tokens: {row['median_us']} us of a layer, 99th {row['p99_us']}", flush=True
        )
    print(json.dumps({"load": os.getloadavg(), "rows": rows}))
    prefill.close()
    decode.close()


if __name__ == "__main__":
    main()
