"""Paged attention on a GPU: right, and as fast as the fused kernel that it stands on."""

import pytest
import torch
from tests.engine.attention.world import World, check_rank
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.attention.passes import Pass
from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.models.base import HeadOptions
from baton.engine.parallel import Mesh
from baton.plan import Cache, Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.plan.ownership import buffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
ALONE = parse_layout("tp1")
PAGE = 64


def test_one_rank() -> None:
    check_rank(Mesh(ALONE, 0), 0, torch.device("cuda"))


def test_half_floats() -> None:
    world = World(Mesh(ALONE, 0), 7, torch.bfloat16, torch.device("cuda"))
    world.step({0: 9, 1: 1, 2: 17})
    world.step({0: 1, 1: 1, 2: 8})
    world.step({0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize("chunk", [8192, 32768])
def test_a_long_prompt_keeps_the_speed_of_the_fused_kernel(chunk: int) -> None:
    device, total = torch.device("cuda"), 32768
    cache = Cache(2, Paged(8, 128).components(((0, 2),)))
    spec = Spec(ALONE, cache, Storage(page_tokens=PAGE, dtype="bf16", num_pages_default=total // PAGE))
    sizes = buffers(spec, 0, "t")
    content = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    pools = CachePools(spec, 0, content, device)
    table = torch.randperm(total // PAGE).tolist()
    work = ScheduledSequence(0, total - chunk, [0] * chunk, {"tokens": table}, total)
    q = torch.randn(chunk, 32, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, chunk, 8, 128, dtype=torch.bfloat16, device=device)
    every = [torch.randn(1, 8, total, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    found = Pass(ScheduledBatch([work]), Mesh(ALONE, 0), pools)

    def bare() -> None:
        rows = q.transpose(0, 1).unsqueeze(0)
        if chunk == total:
            functional.scaled_dot_product_attention(rows, *every, is_causal=True, enable_gqa=True)
            return
        # No fewer scores than a causal chunk has, by the kernel that can do with a prefix.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(rows, *every, enable_gqa=True)

    def paged() -> None:
        found.heads(1, q, k, v, HeadOptions(0.1))

    with torch.inference_mode():
        times = {name: min(_ms(task) for _ in range(5)) for name, task in (("bare", bare), ("paged", paged))}
    print(f"{chunk} of {total}: {times}")
    assert times["paged"] < 1.15 * times["bare"]


def _ms(task: object) -> float:
    assert callable(task)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    task()
    first.record()
    task()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)
