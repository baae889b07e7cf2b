"""The driver's call that copies many spans at once, where it has one (CUDA 12.8 and later)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from baton.plan.steps import Spans

BatchCopy: TypeAlias = Callable[[Spans, int, int, int], int]
"""Of spans, where source and target begin, and the stream: the driver's error, 0 if there is none."""

_DRIVER = "libcuda.so.1"
_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1


class _Attributes(ctypes.Structure):
    """How every copy of a batch is to be made."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("places", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


@cache
def find_batch_copy() -> BatchCopy | None:
    """The call, or None where there is no driver or an older one."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    # Of the two forms the older one also tells which copy failed.
    if (newer := getattr(driver, "cuMemcpyBatchAsync_v2", None)) is not None:
        return _call(newer, has_failed_index=False)
    if (older := getattr(driver, "cuMemcpyBatchAsync", None)) is not None:
        return _call(older, has_failed_index=True)
    return None


def _call(function: Any, *, has_failed_index: bool) -> BatchCopy:
    function.restype = ctypes.c_int
    attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)

    def copy(spans: Spans, source: int, target: int, stream: int) -> int:
        rows = np.empty((3, len(spans)), dtype=np.int64)
        np.add(spans.target, target, out=rows[0])
        np.add(spans.source, source, out=rows[1])
        rows[2] = spans.length
        first_row, row_bytes = rows.ctypes.data, rows.strides[0]
        failed = ctypes.c_size_t(0)
        code: int = function(
            *(ctypes.c_void_p(first_row + index * row_bytes) for index in range(3)),
            ctypes.c_size_t(len(spans)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if has_failed_index else ()),
            ctypes.c_void_p(stream),
        )
        return code

    return copy
