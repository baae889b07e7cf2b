"""How much KV cache the GPUs of this machine have room for, computed before a process is started.

The driver's management library (NVML) is asked, so that the asking process needs no CUDA context, which would
take half a GiB of the memory that it asks about. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton import settings
from baton.errors import ConfigError
from baton.plan.printer import human_bytes

CONTEXT_BYTES = 512 << 20
"""What the CUDA context of a process takes."""
WORKSPACE_BYTES = 1 << 30
"""For activations, the allocator's slack and CUDA graphs."""
_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, in bytes."""

    name: str
    """As CUDA_VISIBLE_DEVICES names it."""
    total: int
    free: int


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def read_gpus() -> list[GpuMemory]:
    """The GPUs that this process may use, in the order of their device numbers; none without a driver."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = [_read_gpu(nvml, name) for name in settings.gpus(count.value)]
    finally:
        nvml.nvmlShutdown()
    return [gpu for gpu in gpus if gpu is not None]


def _read_gpu(nvml: ctypes.CDLL, name: str) -> GpuMemory | None:
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if name.isdecimal():
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        code = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if code or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return GpuMemory(name, memory.total, memory.free)


def gpu_of(base_gpu_id: int, rank: int, num_gpus: int) -> int:
    """The number of the GPU that a rank runs on; ranks share where there are more of them than GPUs."""
    return (base_gpu_id + rank) % num_gpus


def deal_gpus(num_ranks: Sequence[int], num_gpus: int) -> list[tuple[int, float]]:
    """For instances of so many ranks on one machine: the first GPU of each, and its share of its GPUs.

    Each instance takes the GPUs after those of the one before, from the first again where there are not
    enough. Its share is less than 1 where it meets other instances.
    """
    firsts = [sum(num_ranks[:index]) % num_gpus for index in range(len(num_ranks))]
    taken = [
        Counter(gpu_of(first, rank, num_gpus) for rank in range(count))
        for first, count in zip(firsts, num_ranks, strict=True)
    ]
    total = sum(taken, Counter[int]())
    shares = [min(count / total[gpu] for gpu, count in own.items()) for own in taken]
    return list(zip(firsts, shares, strict=True))


@dataclass(frozen=True, slots=True)
class RankRoom:
    """The GPU memory that one rank may take, and its needs beside the KV cache."""

    gpu: GpuMemory
    num_sharing: int
    """Ranks of the instance on this GPU."""
    utilization: float
    """The share of the GPU that all of them may take."""
    weights: int
    other: int
    """Contexts, staging and workspace."""

    @property
    def cache_bytes(self) -> int:
        """Room for the KV cache; below 0 where not even the weights fit."""
        share = min(int(self.utilization * self.gpu.total), self.gpu.free) // self.num_sharing
        return share - self.weights - self.other

    def refusal(self, need: str) -> ConfigError:
        """`what` does not fit, with the numbers."""
        sharing = f", shared by {self.num_sharing} ranks" if self.num_sharing > 1 else ""
        left, weights, other = map(human_bytes, (max(0, self.cache_bytes), self.weights, self.other))
        return ConfigError(
            f"{need} does not fit on GPU {self.gpu.name}: it has {human_bytes(self.gpu.total)}, "
            f"{human_bytes(self.gpu.free)} of them free{sharing}; --gpu-memory-utilization "
            f"{self.utilization:.2g} leaves {left} for it beside {weights} of weights and {other} of "
            "workspace; ask for fewer tokens (--pool-tokens, --max-model-len), use more GPUs, or free it"
        )
