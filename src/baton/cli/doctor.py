"""`baton doctor`: what works on this machine, each line checked by doing it."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from baton.bench.far_end import FarEnd, Target, random_bytes
from baton.errors import BatonError
from baton.plan.steps import Spans
from baton.transport import (
    NOW,
    Batch,
    Capabilities,
    Completion,
    Description,
    Done,
    Reach,
    RemoteRegion,
    Transport,
    open_transport,
    transport_names,
    wait_for_events,
)

NUM_BYTES = 1 << 20
ANSWER_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a part of the machine, whether it works, and what was seen or what to do."""

    name: str
    is_ok: bool
    text: str

    def __str__(self) -> str:
        return f"{self.name} {'ok' if self.is_ok else 'no'}: {self.text}"


def doctor() -> None:
    """Says which transports, devices and kernel features work here, each checked by a real transfer."""
    for finding in findings():
        print(finding, flush=True)


def findings() -> Iterator[Finding]:
    """Every line, one at a time, since a transport may take a moment."""
    for name in transport_names():
        yield check_transport(name)
    yield check_cuda()
    yield check_kernel()


def check_transport(name: str) -> Finding:
    """1 MiB from this process into another, compared by digest."""
    try:
        transport = open_transport(name)
    except ImportError as error:
        return Finding(name, False, f"{_one_line(error)}; run tools/native.sh")
    except BatonError as error:
        return Finding(name, False, str(error))
    try:
        took_s = _transfer(transport)
    except (BatonError, OSError) as error:
        return Finding(name, False, f"{_one_line(error)}; see docs/transports.md")
    finally:
        transport.close()
    return Finding(name, True, f"1 MiB in {took_s * 1e6:.0f} us, {_abilities(transport.capabilities)}")


def _transfer(transport: Transport) -> float:
    if transport.capabilities.reach is Reach.PROCESS:
        target = Target(transport, NUM_BYTES)
        found = target.invite()
        ends = (Description.from_json(found["description"]), RemoteRegion.from_json(found["region"]))
        took_s, sent = _send(transport, *ends)
        arrived = target.digest()
    else:
        with FarEnd(transport.name, {}, NUM_BYTES) as far:
            took_s, sent = _send(transport, *far.invite())
            arrived = far.ask("digest")
    if sent != arrived:
        raise BatonError("the bytes that arrived are not the bytes that were sent; do not use it")
    return took_s


def _send(transport: Transport, description: Description, region: RemoteRegion) -> tuple[float, str]:
    content = random_bytes(NUM_BYTES, os.getpid())
    source = transport.register(content)
    peer = transport.connect(description)
    whole = Spans(*(np.array([value], dtype=np.int64) for value in (0, 0, NUM_BYTES)))
    start = perf_counter()
    transport.submit(peer, Batch(source, region, whole), NOW)
    end = next(event for event in _completions(transport))
    took_s = perf_counter() - start
    if not isinstance(end, Done):
        raise BatonError(end.cause)
    return took_s, hashlib.blake2b(content, digest_size=16).hexdigest()


def _completions(transport: Transport) -> Iterator[Completion]:
    limit = perf_counter() + ANSWER_S_MAX
    while perf_counter() < limit:
        for event in wait_for_events(transport, limit - perf_counter()):
            if hasattr(event, "ticket"):
                yield event
    raise BatonError(f"no completion within {ANSWER_S_MAX:.0f} s")


def _abilities(found: Capabilities) -> str:
    words = [
        f"reach {found.reach.value}",
        " and ".join(sorted(place.value for place in found.places)) + " memory",
    ]
    words.append("strangers refused" if found.can_refuse_strangers else "trusted network only")
    return ", ".join(words)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_cuda() -> Finding:
    """Whether torch sees a GPU, by copying 1 MiB there and back."""
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
        return Finding("cuda", False, f"{name} does not give back what it was given; do not use it")
    return Finding("cuda", True, f"{name}, {torch.cuda.device_count()} visible, 1 MiB there and back")


def check_kernel() -> Finding:
    """Whether the kernel has what shm rests on: memfd and pidfd."""
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        os.close(os.memfd_create("baton-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("kernel", False, f"{name}: {_one_line(error)}; shm needs Linux 5.3 or newer")
    return Finding("kernel", True, f"{name}, memfd and pidfd work")
