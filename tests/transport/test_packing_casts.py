"""Dtypes on the way through an Unpack, held against the numpy reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from baton.plan.dtypes import ITEM_BYTES, convert

torch = pytest.importorskip("torch", reason="packing is done by torch, which is not installed")

from tests.transport.test_packing import PAIRS, Case, an_unpack, random_bytes, whole  # noqa: E402

from baton.transport import packing  # noqa: E402


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


def truncated(source: torch.Tensor, target: torch.Tensor) -> None:
    """Drops the bits that do not fit instead of rounding."""
    kept = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13), packing.FP8: -(1 << 20)}[target.dtype]
    bits = source.float().contiguous().view(torch.int32) & kept
    target.copy_(
        bits.view(torch.float32).clamp(-448, 448) if target.dtype == packing.FP8 else bits.view(torch.float32)
    )


def overflowing(source: torch.Tensor, target: torch.Tensor) -> None:
    """Turns what is beyond fp8 into NaN, as torch did before 2.12."""
    target.copy_(source.where(source.abs() <= packing.FP8_MAX, torch.nan))


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
    monkeypatch.setattr(packing, "cast_into", broken)
    expected, found, is_nan = convert_all(source, target)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
