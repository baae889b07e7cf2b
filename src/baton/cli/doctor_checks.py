"""What `baton doctor` shows: each finding is checked by doing it."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from baton.bench.target_process import digest, random_bytes
from baton.bench.transport import BenchLink
from baton.errors import BatonError
from baton.plan.steps import Spans
from baton.transport import Capabilities, transport_names

NUM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, whether it works, and what was seen or what to do."""

    name: str
    is_ok: bool
    text: str

    def __str__(self) -> str:
        return f"{self.name} {'ok' if self.is_ok else 'no'}: {self.text}"


def findings() -> Iterator[Finding]:
    """Every finding, one at a time: a transport may take a moment."""
    for name in transport_names():
        yield check_transport(name)
    yield check_cuda()
    yield check_kernel()


def check_transport(name: str) -> Finding:
    """Sends 1 MiB from this process into another, and compares digests."""
    try:
        with ExitStack() as stack:
            link = BenchLink(name, NUM_BYTES, stack)
            start = perf_counter()
            link.send(Spans(*(np.array([value], dtype=np.int64) for value in (0, 0, NUM_BYTES))))
            took_s = perf_counter() - start
            if link.target.digest() != digest(link.content):
                raise BatonError(
                    "the bytes that arrived are not the bytes that were sent; do not use this transport"
                )
            abilities = _abilities(link.transport.capabilities)
    except (BatonError, ImportError, OSError) as error:
        return Finding(name, False, _one_line(error))
    return Finding(name, True, f"1 MiB in {took_s * 1e6:.0f} us, {abilities}")


def _abilities(capabilities: Capabilities) -> str:
    memory = " and ".join(sorted(place.value for place in capabilities.places))
    access = "uninvited peers refused" if capabilities.can_refuse_strangers else "trusted network only"
    return f"reach {capabilities.reach.value}, {memory} memory, {access}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_cuda() -> Finding:
    """Whether torch sees a GPU: copies 1 MiB there and back."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Finding("cuda", False, "torch is not installed; pip install torch")
    if not torch.cuda.is_available():
        return Finding("cuda", False, "torch sees no GPU; install a driver and a CUDA build of torch")
    content = torch.from_numpy(random_bytes(NUM_BYTES, 1))
    back = content.cuda().cpu()
    name = torch.cuda.get_device_name(0)
    if not torch.equal(back, content):
        return Finding("cuda", False, f"{name} returned other bytes than were copied to it; do not use it")
    return Finding("cuda", True, f"{name}, {torch.cuda.device_count()} visible, 1 MiB there and back")


def check_kernel() -> Finding:
    """Whether the kernel has what shm needs: memfd and pidfd."""
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        os.close(os.memfd_create("baton-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("kernel", False, f"{name}: {_one_line(error)}; shm needs Linux 5.3 or newer")
    return Finding("kernel", True, f"{name}, memfd and pidfd work")
