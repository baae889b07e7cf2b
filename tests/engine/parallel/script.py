"""Steps over several sequences, as one rank of any layout runs them.

The same script runs under every layout: chunked prefill, decode, sequences that come and go, pages in random
order. Under dp the sequences are dealt over the groups, so that some batches are empty.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.engine.hooks import NoHooks

from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.model_runner import ModelRunner
from baton.engine.models.build import build
from baton.engine.parallel import Mesh
from baton.plan import Spec, Storage
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack
from baton.plan.ownership import buffers

PAGE = 4
NUM_PAGES = 96
CPU = torch.device("cpu")
Logits = dict[tuple[int, int], np.ndarray[Any, Any]]
_CHUNKS = {0: [1], 1: [PAGE - 1], 2: [PAGE], 3: [PAGE + 1, 2], 4: [9, 1, 14], 5: [33], 6: [2, 3, 17, 8]}
"""Chunk lengths of each sequence's prompt; five tokens are decoded after it."""
NUM_DECODED = 5


@dataclass(frozen=True, slots=True)
class Script:
    """Batches of every step, by dp group."""

    steps: list[list[ScheduledBatch]]


def script(num_groups: int, vocab_size: int, seed: int = 0) -> Script:
    """Sequence i is in dp group i % num_groups, and begins at step i // 2."""
    chance = random.Random(seed)
    pages = chance.sample(range(NUM_PAGES), NUM_PAGES)
    slots = chance.sample(range(NUM_PAGES), len(_CHUNKS))
    tables, tokens = {}, {}
    for i, chunks in _CHUNKS.items():
        total = sum(chunks) + NUM_DECODED
        tables[i] = [pages.pop() for _ in range(-(-total // PAGE))]
        tokens[i] = [chance.randrange(vocab_size) for _ in range(total)]
    steps: list[list[ScheduledBatch]] = []
    lengths = {i: [*chunks, *[1] * NUM_DECODED] for i, chunks in _CHUNKS.items()}
    starts = dict.fromkeys(_CHUNKS, 0)
    while any(lengths.values()):
        groups: list[list[ScheduledSequence]] = [[] for _ in range(num_groups)]
        for i, left in lengths.items():
            if not left or i // 2 > len(steps):
                continue
            length, start = left.pop(0), starts[i]
            starts[i] += length
            num_prompt = sum(_CHUNKS[i])
            is_inside = starts[i] < num_prompt
            work = ScheduledSequence(
                sequence=i,
                start=start,
                tokens=tokens[i][start : starts[i]],
                pages={"tokens": tables[i], "state": [slots[i]]},
                prompt_tokens=num_prompt,
                num_samples=0 if is_inside else 1,
            )
            groups[i % num_groups].append(work)
        steps.append([ScheduledBatch(works) for works in groups])
    return Script(steps)


def run_ranks(mesh: Mesh, folders: list[Path], device: torch.device = CPU) -> list[Logits]:
    """The script for several checkpoints, one after the other."""
    return [run_rank(mesh, folder, device) for folder in folders]


def run_rank(mesh: Mesh, folder: Path, device: torch.device = CPU) -> Logits:
    """The script on one rank: logits by step and sequence where they are whole."""
    checkpoint = open_checkpoint(str(folder))
    cache = stack((read_config(checkpoint.config, "tiny"),))
    spec = Spec(mesh.layout, cache, Storage(page_tokens=PAGE, dtype="fp32", num_pages_default=NUM_PAGES))
    # What was in the pools before must not matter, be it not even a number.
    content = {
        name: torch.full((size,), 255, dtype=torch.uint8, device=device)
        for name, size in buffers(spec, mesh.rank, "t").items()
    }
    pools = CachePools(spec, mesh.rank, content, device)
    stage = build(checkpoint, mesh.cut(cache.num_layers, torch.float32, device))
    runner = ModelRunner(stage, mesh, pools)
    found: Logits = {}
    plan = script(mesh.layout.size("dp"), checkpoint.config["vocab_size"])
    for number, batches in enumerate(plan.steps):
        logits = runner.run(batches, NoHooks())
        if logits is not None:
            sampled = [work.sequence for work in batches[mesh.at["dp"]].sequences if work.num_samples]
            found |= {(number, i): row.cpu().numpy() for i, row in zip(sampled, logits, strict=True)}
    return found
