"""Dtypes and scales on the way through an Unpack, held against the numpy reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.plan.dtypes import ITEM_BYTES, convert
from baton.plan.steps import Spans, Unpack

torch = pytest.importorskip("torch", reason="packing is done by torch, which is not installed")

from tests.transport.test_packing import (  # noqa: E402
    DEVICES,
    FILL,
    FINITE,
    PAIRS,
    Case,
    an_unpack,
    ints,
    on_device,
    random_bytes,
    whole,
)

from baton.transport import packing  # noqa: E402
from baton.transport.packing import casts  # noqa: E402


def codes_of(dtype: str) -> np.ndarray:
    """Every code of a small dtype; of fp32, those around every code of the others, and random ones."""
    if dtype == "fp8":
        return np.arange(256, dtype=np.uint8)
    if dtype != "fp32":
        return np.arange(65536, dtype=np.uint16).view(np.uint8)
    centres = [convert(codes_of(other), other, "fp32").view(np.uint32) for other in ("bf16", "fp16", "fp8")]
    near = np.concatenate(centres)
    halves = [near + np.uint32(bit) for bit in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x80000)]
    return np.concatenate([*halves, random_bytes(0, 1 << 18).view(np.uint32)]).view(np.uint8)


def convert_all(source: str, target: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every code by the reference and by torch, as matrices of bytes, and which of them are NaN."""
    raw = codes_of(source)
    with np.errstate(invalid="ignore"):
        expected = convert(raw, source, target)
        is_nan = np.isnan(convert(expected, target, "fp32").view(np.float32))
    spans = whole(len(raw))
    found = Case(an_unpack(spans, (source, target)), raw, len(expected)).found()
    width = ITEM_BYTES[target]
    return expected.reshape(-1, width), found.reshape(-1, width), is_nan


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_number_converts_to_the_same_bits(source: str, target: str) -> None:
    expected, found, is_nan = convert_all(source, target)
    np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
    values = convert(np.ascontiguousarray(found[is_nan]).reshape(-1), target, "fp32").view(np.float32)
    assert np.isnan(values).all()
    assert is_nan.any()


def paged_values(dtype: str, seed: int = 0) -> tuple[Unpack, np.ndarray, np.ndarray]:
    """An Unpack to fp8 of 6 pages of 4 rows, the pages' sizes apart, pages at 9, 7, .. of 10; its staging."""
    rng = np.random.default_rng(seed)
    item, row = ITEM_BYTES[dtype], 24
    pages = ints(9, 7, 4, 3, 1, 0)
    values = rng.normal(size=(6, 4, row)) * 10.0 ** np.arange(-4, 2)[:, None, None]
    raw = convert(values.astype(np.float32).reshape(-1).view(np.uint8), "fp32", dtype)
    target = (pages[:, None] * (4 * 32) + np.arange(4) * 32 + 3).ravel()
    source = np.arange(24, dtype=np.int64) * (row * item)
    step = an_unpack(Spans(source, target, np.full(24, row * item, dtype=np.int64)), (dtype, "fp8"))
    return step, raw, np.repeat(pages, 4)


def at_spans(step: Unpack, target: np.ndarray) -> np.ndarray:
    """What the target holds of a step's rows, which are all of one length."""
    item, target_item = (ITEM_BYTES[dtype] for dtype in step.dtypes)
    width = int(step.spans.length[0]) // item * target_item
    return np.ascontiguousarray(target[step.spans.target[:, None] + np.arange(width)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_to_fp8_each_page_gets_its_scale(device: str, dtype: str) -> None:
    step, raw, pages = paged_values(dtype)
    values = torch.full((12,), -1.0, device=device)
    target = torch.full((10 * 4 * 32,), FILL, dtype=torch.uint8, device=device)
    packing.unpack(step, on_device(raw, 0, device), target, packing.Scales(values, pages))
    numbers = convert(raw, dtype, "fp32").view(np.float32).reshape(6, 96)
    scale = np.abs(numbers).max(axis=1) / np.float32(448)
    expected = np.full(12, -1.0, dtype=np.float32)
    expected[pages[::4]] = scale
    np.testing.assert_array_equal(values.cpu().numpy(), expected)
    codes = convert((numbers / scale[:, None]).reshape(-1).view(np.uint8), "fp32", "fp8")
    image = np.full(len(target), FILL, dtype=np.uint8)
    image[step.spans.target[:, None] + np.arange(24)] = codes.reshape(24, 24)
    np.testing.assert_array_equal(target.cpu().numpy(), image)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_from_fp8_each_page_is_multiplied_by_its_scale(dtype: str) -> None:
    step, _, pages = paged_values("bf16")
    raw = random_bytes(1, 24 * 24) & FINITE
    length = np.full(24, 24, dtype=np.int64)
    spans = Spans(np.arange(24, dtype=np.int64) * 24, step.spans.target * 4, length)
    step = an_unpack(spans, ("fp8", dtype))
    given_scales = np.linspace(0.01, 3, 10, dtype=np.float32)
    target = torch.full((10 * 4 * 32 * 4,), FILL, dtype=torch.uint8)
    values = torch.from_numpy(given_scales.copy())
    packing.unpack(step, torch.from_numpy(raw), target, packing.Scales(values, pages))
    numbers = convert(raw, "fp8", "fp32").view(np.float32).reshape(24, 24) * given_scales[pages][:, None]
    expected = convert(numbers.reshape(-1).view(np.uint8), "fp32", dtype).reshape(24, -1)
    np.testing.assert_array_equal(at_spans(step, target.numpy()), expected)
    np.testing.assert_array_equal(values.numpy(), given_scales)


@given(seed=st.integers(0, 1 << 20), dtype=st.sampled_from(["bf16", "fp16", "fp32"]))
def test_a_trip_through_scaled_fp8_stays_within_its_precision(seed: int, dtype: str) -> None:
    step, raw, pages = paged_values(dtype, seed)
    values, packed = torch.zeros(10), torch.zeros(10 * 4 * 32, dtype=torch.uint8)
    packing.unpack(step, torch.from_numpy(raw), packed, packing.Scales(values, pages))
    length = np.full(24, 24, dtype=np.int64)
    back = an_unpack(Spans(step.spans.target, np.arange(24, dtype=np.int64) * 96, length), ("fp8", "fp32"))
    result = torch.zeros(24 * 96, dtype=torch.uint8)
    packing.unpack(back, packed, result, packing.Scales(values, pages))
    numbers = convert(raw, dtype, "fp32").view(np.float32).reshape(24, 24)
    error = np.abs(result.numpy().view(np.float32).reshape(24, 24) - numbers)
    # Three bits of fraction; below the normal numbers, half of the smallest step.
    bound = np.maximum(np.abs(numbers) * 2.0**-4, values.numpy()[pages][:, None] * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()


def test_pages_of_zeros_and_of_what_is_no_number() -> None:
    numbers = np.array([[0, 0, 0, 0], [1, -2, np.nan, np.inf], [1e-45, 0, 0, 0]], dtype=np.float32)
    spans = Spans(ints(0, 16, 32), ints(0, 4, 8), ints(16, 16, 16))
    target, values = torch.zeros(12, dtype=torch.uint8), torch.zeros(3)
    staging = torch.from_numpy(numbers.reshape(-1).view(np.uint8).copy())
    packing.unpack(an_unpack(spans, ("fp32", "fp8")), staging, target, packing.Scales(values, ints(0, 1, 2)))
    assert values.tolist() == [1.0, np.float32(2) / np.float32(448), 1.0]
    found = convert(target.numpy().copy(), "fp8", "fp32").view(np.float32).reshape(3, 4)
    assert found[[0, 2]].tolist() == [[0] * 4] * 2
    assert found[1, [0, 1, 3]].tolist() == [224, -448, 448]
    assert np.isnan(found[1, 2])


def test_joined_spans_are_cut_at_pages() -> None:
    spans = Spans(ints(0, 40, 60), ints(10, 100, 48), ints(40, 20, 4))
    step, pages = packing.cut_by_page(an_unpack(spans, ("bf16", "fp8")), 16)
    found = zip(step.spans.source, step.spans.target, step.spans.length, pages, strict=True)
    assert [tuple(map(int, row)) for row in found] == [
        (0, 10, 12, 0),
        (12, 16, 28, 1),
        (40, 100, 20, 6),
        (60, 48, 4, 3),
    ]
    raw = random_bytes(2, 64) & FINITE
    np.testing.assert_array_equal(
        Case(step, raw, 128).found(), Case(replace(step, spans=spans), raw, 128).found()
    )


def truncated(source: torch.Tensor, target: torch.Tensor) -> None:
    """Drops the bits that do not fit instead of rounding."""
    kept = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13), casts.FP8: -(1 << 20)}[target.dtype]
    bits = source.float().contiguous().view(torch.int32) & kept
    target.copy_(
        bits.view(torch.float32).clamp(-448, 448) if target.dtype == casts.FP8 else bits.view(torch.float32)
    )


def overflowing(source: torch.Tensor, target: torch.Tensor) -> None:
    """Turns what is beyond fp8 into NaN, as torch did before 2.12."""
    target.copy_(source.where(source.abs() <= casts.FP8_MAX, torch.nan))


@pytest.mark.parametrize(
    ("broken", "source", "target"),
    [
        (truncated, "fp32", "bf16"),
        (truncated, "fp32", "fp16"),
        (truncated, "fp32", "fp8"),
        (truncated, "bf16", "fp8"),
        (overflowing, "fp16", "fp8"),
    ],
)
def test_a_broken_cast_is_caught(
    broken: Callable, source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casts, "cast_into", broken)
    expected, found, is_nan = convert_all(source, target)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
