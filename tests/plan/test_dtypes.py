"""Element types by numpy alone: exact where a value fits, nearest even where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from baton.plan.dtypes import convert


def through(values: list[float], target: str) -> np.ndarray:
    raw = np.array(values, dtype=np.float32).view(np.uint8)
    return convert(convert(raw, "fp32", target), target, "fp32").view(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_every_code_survives_a_trip_through_fp32(dtype: str) -> None:
    codes = (
        np.arange(256, dtype=np.uint8) if dtype == "fp8" else np.arange(65536, dtype=np.uint16).view(np.uint8)
    )
    back = convert(convert(codes, dtype, "fp32"), "fp32", dtype)
    values = convert(codes, dtype, "fp32").view(np.float32)
    width = 1 if dtype == "fp8" else 2
    same = (codes.reshape(-1, width) == back.reshape(-1, width)).all(axis=1)
    assert same[~np.isnan(values)].all()
    assert np.isnan(convert(back, dtype, "fp32").view(np.float32)[np.isnan(values)]).all()


def test_bf16_rounds_to_nearest_even() -> None:
    step = 2**-8
    values = [1.0, 1 + step, 1 + 3 * step, 1 + step + 2**-20, -1 - 3 * step]
    assert through(values, "bf16").tolist() == [1.0, 1.0, 1 + 4 * step, 1 + 2 * step, -1 - 4 * step]
    assert np.isinf(through([3.4e38], "bf16"))[0]


def test_fp16_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 100
    assert (through(values.tolist(), "fp16") == values.astype(np.float16).astype(np.float32)).all()


def test_fp8_known_values() -> None:
    codes = np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0xB8], dtype=np.uint8)
    values = convert(codes, "fp8", "fp32").view(np.float32).tolist()
    assert values == [0.0, 2**-9, 2**-6, 1.0, 448.0, -448.0, -1.0]
    assert through([1000.0, -1000.0, 1.0625, 1.1875, 17.0, 19.0], "fp8").tolist() == [
        448,
        -448,
        1.0,
        1.25,
        16.0,
        20.0,
    ]
    assert np.isnan(through([float("nan")], "fp8"))[0]
