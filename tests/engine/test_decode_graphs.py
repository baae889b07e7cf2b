"""Decode steps on a GPU: what paged kernels and CUDA graphs compute is what the general pass computes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.hooks import NoHooks
from tests.engine.tiny import tiny
from torch import Tensor

from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.model_runner import ModelRunner, open_decoding, why_not_captured, why_not_paged
from baton.engine.models.build import build, describe
from baton.engine.pages import engine_storage
from baton.engine.parallel import Mesh
from baton.plan import Spec, parse_layout
from baton.plan.models.config import read_cache
from baton.plan.ownership import buffers

PAGE, ROWS_MAX, CONTEXT = 4, 6, 64
CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def test_fp8_runs_without_the_kernels() -> None:
    checkpoint = open_checkpoint(str(tiny("llama")))
    cache, mesh = read_cache(checkpoint.config, "tiny"), Mesh(parse_layout("tp1"), 0)
    spec = Spec(mesh.layout, cache, replace(engine_storage(cache, PAGE, "fp8"), num_pages_default=1))
    content = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "t").items()}
    stage = build(checkpoint, mesh.cut(cache.num_layers, torch.float32, torch.device("cpu")))
    reason = why_not_paged(stage, mesh, CachePools(spec, 0, content, CUDA))
    assert reason == "no kernel reads an fp8 KV cache"


class Rig:
    """One rank with a tiny model; with `is_paged` its decode steps run on the kernels."""

    def __init__(self, folder: Path, *, is_paged: bool) -> None:
        checkpoint = open_checkpoint(str(folder))
        cache = read_cache(checkpoint.config, "tiny")
        mesh = Mesh(parse_layout("tp1"), 0)
        storage = engine_storage(cache, PAGE, "fp32")
        spec = Spec(mesh.layout, cache, replace(storage, num_pages_default=128))
        content = {
            name: torch.zeros(size, dtype=torch.uint8, device=CUDA)
            for name, size in buffers(spec, 0, "t").items()
        }
        self.groups = tuple(cache.groups)
        pools = CachePools(spec, 0, content, CUDA)
        stage = build(checkpoint, mesh.cut(cache.num_layers, torch.float32, CUDA), max_context=CONTEXT)
        self.reason = why_not_paged(stage, mesh, pools)
        decoding = open_decoding(pools, ROWS_MAX, CONTEXT) if is_paged and not self.reason else None
        self.runner = ModelRunner(stage, mesh, pools, decoding)
        self.is_captured = False
        if decoding is not None and not why_not_captured(mesh, describe(checkpoint.config).num_experts):
            self.runner.capture()
            self.is_captured = True

    def run(self, works: list[ScheduledSequence]) -> Tensor:
        logits = self.runner.run([ScheduledBatch(works)], NoHooks())
        assert logits is not None
        return logits.clone()


class Sequence:
    """One sequence, whose pages are given to it one by one, in an odd order."""

    def __init__(self, number: int, prompt: list[int], groups: tuple[str, ...]) -> None:
        self.number, self.tokens, self.groups = number, list(prompt), groups
        self.num_prompt, self.num_computed = len(prompt), 0

    def next(self) -> ScheduledSequence:
        start, new = self.num_computed, self.tokens[self.num_computed :]
        self.num_computed = len(self.tokens)
        pages = [(self.number * 16 + i * 7 % 16) for i in range(-(-len(self.tokens) // PAGE))]
        tables = {group: list(pages) for group in self.groups}
        return ScheduledSequence(self.number, start, new, tables, self.num_prompt, 1)


def generate(
    rig: Rig, lengths: list[int], num_steps: int, vocab_size: int
) -> tuple[list[Tensor], list[list[int]]]:
    """Greedy tokens of several sequences; each step has one sequence fewer, and the last has all."""
    generator = torch.Generator().manual_seed(5)
    sequences = [
        Sequence(number, torch.randint(3, vocab_size, (length,), generator=generator).tolist(), rig.groups)
        for number, length in enumerate(lengths)
    ]
    logits = [rig.run([sequence.next() for sequence in sequences])]
    for sequence, token in zip(sequences, logits[0].argmax(-1).tolist(), strict=True):
        sequence.tokens.append(token)
    for step in range(num_steps):
        chosen = sequences[step % len(sequences) :]
        found = rig.run([sequence.next() for sequence in chosen])
        for sequence, token in zip(chosen, found.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
        logits.append(found)
    return logits, [sequence.tokens for sequence in sequences]


@needs_gpu
@pytest.mark.parametrize(
    ("family", "is_captured"),
    [
        ("llama", True),
        ("qwen2", True),
        ("qwen3", True),
        ("gemma3_text", True),
        ("qwen3_moe", False),
        ("deepseek_v2", False),
        ("deepseek_v3", False),
    ],
)
def test_paged_steps_give_the_logits_of_the_general_pass(
    family: str, is_captured: bool, tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path)
    plain, paged = Rig(folder, is_paged=False), Rig(folder, is_paged=True)
    assert paged.reason == ""
    assert paged.is_captured == is_captured
    vocab_size = open_checkpoint(str(folder)).config["vocab_size"]
    wanted = generate(plain, [3, 9, 1, 17, 30], 12, vocab_size)
    found = generate(paged, [3, 9, 1, 17, 30], 12, vocab_size)
    assert found[1] == wanted[1]
    for one, other in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@needs_gpu
def test_a_family_without_a_kernel_is_named(tmp_path: Path) -> None:
    assert Rig(tiny("deepseek_v32", tmp_path), is_paged=True).reason == "no kernel reads index_k"


@needs_gpu
def test_a_step_that_prefills_is_left_to_the_general_pass(tmp_path: Path) -> None:
    rig = Rig(tiny("llama", tmp_path), is_paged=True)
    decoding = rig.runner._decoding
    assert decoding is not None
    one = ScheduledSequence(0, 7, [5], {"tokens": [1, 2]}, 7, 1)
    assert decoding.fits(ScheduledBatch([one]))
    last_of_prompt = ScheduledSequence(1, 6, [5], {"tokens": [3, 4]}, 7, 1)
    prompt = ScheduledSequence(2, 0, [5, 6], {"tokens": [5]}, 2, 1)
    for other in (last_of_prompt, prompt):
        assert not decoding.fits(ScheduledBatch([one, other]))
    assert not decoding.fits(ScheduledBatch([one] * (ROWS_MAX + 1)))
    assert not decoding.fits(ScheduledBatch())


def test_graph_sizes_reach_the_largest_batch_with_little_padding() -> None:
    graphs = pytest.importorskip("baton.engine.decode_graphs", reason="triton is not installed")
    for rows_max in (1, 2, 7, 8, 64, 100):
        sizes = graphs.graph_sizes(rows_max)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == rows_max
        assert all(b <= a + max(1, a // 2) for a, b in itertools.pairwise(sizes))
