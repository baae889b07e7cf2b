"""The paged kernels, on a GPU, against attention that is spelled out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.models.base import HeadOptions

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)
paged = pytest.importorskip("baton.engine.attention.paged", reason="triton is not installed")

CUDA = torch.device("cuda")
LENGTHS = [1, 0, 77, 130, 64]
NUM_PAGES, PAGES_MAX = 64, 10
SINKS = [0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 3.0, 0.1]


def spelled_out(q: Tensor, k: Tensor, v: Tensor, table: paged.PageTable, options: HeadOptions) -> Tensor:
    """The same, one sequence at a time."""
    out = q.new_zeros((len(q), q.shape[1], v.shape[-1]))
    for row, length in enumerate(table.lengths.tolist()):
        lowest = 0 if options.window is None else max(0, length - options.window)
        places = [
            (int(table.pages[row, t // table.page_tokens]), t % table.page_tokens)
            for t in range(lowest, length)
        ]
        if not places:
            continue
        keys, values = (torch.stack([pool[page, :, slot] for page, slot in places]) for pool in (k, v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("hc,nhc->hn", q[row], keys.repeat_interleave(group, 1)) * options.scale
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[:, None]), 1)
        shares = scores.softmax(-1)[:, : len(places)]
        out[row] = torch.einsum("hn,nhc->hc", shares, values.repeat_interleave(group, 1))
    return out


def tables(page_tokens: int) -> paged.PageTable:
    pages = torch.randperm(NUM_PAGES)[: len(LENGTHS) * PAGES_MAX].view(len(LENGTHS), PAGES_MAX)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    return paged.PageTable(pages.to(CUDA, torch.int32), lengths, page_tokens)


@pytest.mark.parametrize(
    ("page_tokens", "num_heads", "num_units", "num_channels"),
    [(16, 8, 2, 64), (64, 6, 3, 24), (16, 8, 8, 128)],
)
@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
@pytest.mark.parametrize("splits", [1, 8])
def test_heads(
    page_tokens: int, num_heads: int, num_units: int, num_channels: int, kind: str, splits: int
) -> None:
    torch.manual_seed(0)
    table = tables(page_tokens)
    both = torch.randn(NUM_PAGES, 2 * num_units, page_tokens, num_channels, device=CUDA)
    k, v = both[:, :num_units], both[:, num_units:]
    q = torch.randn(len(LENGTHS), num_heads, num_channels, device=CUDA)
    options = {
        "plain": HeadOptions(0.2),
        "window": HeadOptions(0.2, window=20),
        "sinks": HeadOptions(0.2, window=100, sinks=torch.tensor(SINKS[:num_heads], device=CUDA)),
    }[kind]
    found = paged.attend(q, k, v, table, options, splits)
    torch.testing.assert_close(found, spelled_out(q, k, v, table, options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_values", "num_channels", "num_heads"), [(32, 48, 6), (20, 28, 3), (512, 576, 40)]
)
@pytest.mark.parametrize("splits", [1, 8])
def test_latents(num_values: int, num_channels: int, num_heads: int, splits: int) -> None:
    torch.manual_seed(1)
    table = tables(16)
    pool = torch.randn(NUM_PAGES, 16, num_channels, device=CUDA)
    q = torch.randn(len(LENGTHS), num_heads, num_channels, device=CUDA)
    options = HeadOptions(0.05)
    found = paged.attend_latent(q, pool, num_values, table, options, splits)
    wanted = spelled_out(q, pool[:, None], pool[:, None, :, :num_values], table, options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_stored_at_the_last_token_and_nowhere_else(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    table = tables(16)
    pool = torch.randn(NUM_PAGES, 3, 16, 24, device=CUDA).to(dtype)
    rows, wanted = torch.randn(len(LENGTHS), 3, 24, device=CUDA), pool.clone()
    for row, length in enumerate(LENGTHS):
        if length:
            page = int(table.pages[row, (length - 1) // 16])
            wanted[page, :, (length - 1) % 16] = rows[row].to(dtype)
    paged.store(rows, pool, table)
    assert torch.equal(pool, wanted)


def test_half_floats_are_near_what_float32_gives() -> None:
    torch.manual_seed(3)
    table = tables(64)
    k, v = (torch.randn(NUM_PAGES, 8, 64, 128, device=CUDA) for _ in range(2))
    q, options = torch.randn(len(LENGTHS), 32, 128, device=CUDA), HeadOptions(128**-0.5)
    halves = [x.bfloat16() for x in (q, k, v)]
    found = paged.attend(*halves, table, options, 8)
    wanted = spelled_out(*(x.float() for x in halves), table, options)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_layers_do_between_matrices(dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("baton.engine.models.kernels")
    torch.manual_seed(4)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    wide = torch.randn(5, 3 * 96, device=CUDA, dtype=dtype)
    x, weight = wide[:, 96:192], torch.randn(96, device=CUDA, dtype=dtype)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5), torch.rms_norm(x, (96,), weight, 1e-5), **near
    )
    gates = wide.float()
    wanted = torch.nn.functional.silu(gates[:, :144]) * gates[:, 144:]
    torch.testing.assert_close(kernels.silu_gate(wide).float(), wanted, **near)
    heads = wide.view(5, 12, 24)[:, 2:9]
    positions = torch.tensor([0, 3, 3, 99, 17], device=CUDA)
    angles = torch.randn(100, 12, device=CUDA)
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    cos, sin = table[positions].float().unsqueeze(1).chunk(2, dim=-1)
    a, b = heads.float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    torch.testing.assert_close(kernels.rotate(heads, positions, table).float(), turned, **near)
