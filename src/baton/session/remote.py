"""An endpoint whose work is done by another process: the engine's half of `baton.session.process`.

`RemoteEndpoint` has the calls of `Endpoint`, and its handles are the same classes. A call checks its
arguments here and sends one message. A thread receives the changes. For a group of layers on a GPU the engine
records one more event, which the other process can wait for.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import astuple

from baton.errors import ConfigError, LocalProtocolError
from baton.plan import Spec
from baton.plan.tokens import Ints
from baton.protocol.outcomes import Aux, Cause, Failed, Stage, Why
from baton.protocol.timings import check_progress
from baton.session.endpoint import ANSWER_S_MAX, EndpointBase, EndpointConfig
from baton.session.handles import (
    CheckedPages,
    Digest,
    Handle,
    OfferedChunk,
    Pages,
    Receiving,
    Request,
    Sending,
    check_transfer,
    read_pages,
)
from baton.session.loop import exit_loudly
from baton.session.memory import PageClaims, check_buffers
from baton.session.process import (
    BUFFERS_MAX,
    Call,
    Changed,
    FenceName,
    Over,
    ProcessSetup,
    Reply,
    Serving,
    SharedBuffer,
    TransportConfig,
    Wire,
    torch,
)
from baton.transport import NOW, Bytes, CudaFence, Fence
from baton.transport.shm.ring import Segment, create_segment, map_segment

PROGRAM = "from baton.session.process import main; main()"
END_S_MAX = 5.0


class EndpointProcess:
    """The process of an endpoint. Start it early: it imports what it needs while the engine loads weights."""

    def __init__(self, transport: TransportConfig) -> None:
        self.transport = transport
        self._segments: list[Segment] = []
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed host memory for pools."""
        if num_bytes < 1:
            raise ConfigError(f"a segment needs at least one byte; got {num_bytes}")
        fd = create_segment("baton-pool", num_bytes)
        mapping = map_segment(fd, num_bytes, lambda: False)
        self._segments.append(Segment(fd, mapping.address, num_bytes))
        return mapping.bytes

    def share(self, name: str, buffer: Any) -> tuple[SharedBuffer, list[int]]:
        """A pool as the process will find it, and the descriptor to send along if there is one."""
        if getattr(buffer, "is_cuda", False):
            reduced = _reductions().reduce_tensor(buffer)
            return SharedBuffer(name, int(buffer.nbytes), pickle.dumps(reduced)), []
        address = buffer.ctypes.data if isinstance(buffer, np.ndarray) else int(buffer.data_ptr())
        for segment in self._segments:
            if segment.address == address and segment.num_bytes == int(buffer.nbytes):
                return SharedBuffer(name, segment.num_bytes), [segment.fd]
        raise ConfigError(
            f"buffer {name!r} is host memory that the endpoint's process cannot reach; take it from "
            "EndpointProcess.allocate, as a whole"
        )

    def close(self) -> None:
        """Ends the process if it still runs."""
        self.socket.close()
        for segment in self._segments:
            with suppress(OSError):
                os.close(segment.fd)
        self._segments.clear()
        try:
            self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class EventPool:
    """CUDA events that the other process can wait for; an event is reused once nothing waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[int, Any]]] = {}
        self._numbers = itertools.count()
        self._streams: dict[int, Any] = {}

    def record(self, event: Any) -> tuple[FenceName, tuple[int, int, Any]]:
        """An event that completes when `event` does; give the second value back when nothing waits for it."""
        cuda = torch().cuda
        device = event.device.index if event.device is not None else cuda.current_device()
        with self._lock:
            free = self._free.setdefault(device, [])
            is_new = not free
            if is_new:
                free.append((next(self._numbers), cuda.Event(interprocess=True, blocking=True)))
            number, own = free.pop()
            if device not in self._streams:
                self._streams[device] = cuda.Stream(device)
            stream = self._streams[device]
        # Recorded in a stream that does nothing else: the engine's event may lie in any.
        stream.wait_event(event)
        own.record(stream)
        return FenceName(number, True, device, own.ipc_handle() if is_new else b""), (device, number, own)

    def give_back(self, used: list[tuple[int, int, Any]]) -> None:
        """Nothing waits for these events any more."""
        with self._lock:
            for device, number, event in used:
                self._free[device].append((number, event))


class RemoteSendings:
    """The driver of an engine's sending handles: each call becomes one message."""

    def __init__(self, spec: Spec, wire: Wire) -> None:
        self._spec = spec
        self._wire = wire
        self._keys: dict[Sending, int] = {}
        self._tables: dict[Sending, Mapping[str, Ints]] = {}
        """The table that was sent last."""
        self._last_table = CheckedPages()
        self._events = EventPool()
        self._used: dict[Sending, list[tuple[int, int, Any]]] = {}
        self._withdrawals: dict[Sending, int] = {}
        """The number of the last one: a sending may be withdrawn several times."""
        self._fence_numbers = itertools.count()

    def add(self, sending: Sending, key: int) -> None:
        self._keys[sending] = key

    def forget(self, sending: Sending) -> None:
        """It was released: nothing waits for its events."""
        self._keys.pop(sending, None)
        self._tables.pop(sending, None)
        self._withdrawals.pop(sending, None)
        self._events.give_back(self._used.pop(sending, []))

    def read_pages(self, pages: Pages) -> CheckedPages:
        """A copy of a page table; most offers come with the table of the one before."""
        last = self._last_table
        if pages.keys() == last.keys() and all(_is_same(ids, last[group]) for group, ids in pages.items()):
            return last
        self._last_table = read_pages(pages, self._spec)
        return self._last_table

    def chunk_ready(self, sending: Sending, chunk: OfferedChunk) -> None:
        key = self._keys.get(sending)
        if key is None:
            return
        is_known = self._tables.get(sending) is chunk.pages
        self._tables[sending] = chunk.pages
        arguments = (chunk.layers, chunk.tokens, None if is_known else chunk.pages)
        fence = self.name_fence(chunk.fence, sending)
        self._wire.send(Call("ready", arguments, key, None if fence is None else astuple(fence)))

    def queued(self, sending: Sending) -> None:
        self._call(sending, "queued")

    def seal(self, sending: Sending, aux: Aux | None) -> None:
        self._call(sending, "commit", aux)

    def answer_ended(self, sending: Sending, aux: Aux) -> None:
        self._call(sending, "finish", aux)

    def abort_sending(self, sending: Sending, text: str) -> None:
        self._call(sending, "abort", text)

    def withdraw(self, sending: Sending) -> None:
        number = self._withdrawals[sending] = self._withdrawals.get(sending, 0) + 1
        self._call(sending, "withdraw", number)

    def is_last_withdrawal(self, sending: Sending, number: int) -> bool:
        """Whether what the process says of a withdrawal is meant for the last one."""
        return self._withdrawals.get(sending) == number

    def _call(self, sending: Sending, method: str, *arguments: object) -> None:
        if (key := self._keys.get(sending)) is not None:
            self._wire.send(Call(method, arguments, key))

    def name_fence(self, fence: Fence, sending: Sending | None = None) -> FenceName | None:
        """How the other process knows a fence; None for one that is ready."""
        if fence is NOW:
            return None
        if isinstance(fence, CudaFence) and sending is not None:
            name, used = self._events.record(fence.event)
            self._used.setdefault(sending, []).append(used)
            return name
        if fence.is_ready():
            return None
        number = next(self._fence_numbers)
        # Sent after the message that names it: the caller is about to send that one.
        threading.Thread(
            target=fence.call_when_ready,
            args=(lambda: self._wire.send(Call("fence_ready", (number,))),),
            daemon=True,
        ).start()
        return FenceName(number)


class RemoteEndpoint(EndpointBase):
    """One rank's end of every hand-over, in a process of its own."""

    def __init__(
        self,
        config: EndpointConfig,
        pools: Mapping[str, Any],
        process: EndpointProcess,
        on_end: Callable[[str], None] = exit_loudly,
    ) -> None:
        self.config = config
        self._process = process
        self._on_end = on_end
        self._on_change: Callable[[Handle], None] = lambda handle: None
        self._registry = config.registry
        self._serving = threading.Event()
        self._handles: dict[int, Handle] = {}
        self._keys = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._claims = PageClaims(config.spec)
        check_buffers(config.spec, config.rank, pools)
        address, epoch = self._open(pools)
        self._sendings = RemoteSendings(config.spec, self._wire)
        self.config = replace(config, epoch=epoch)
        self._address = config.coordinator or address
        self._thread = threading.Thread(target=self._listen, name="baton-endpoint", daemon=True)
        self._thread.start()

    def _open(self, pools: Mapping[str, Any]) -> tuple[str, int]:
        """The address and the epoch of the endpoint."""
        shared = [self._process.share(name, buffer) for name, buffer in pools.items()]
        descriptors = [fd for _, fds in shared for fd in fds]
        if len(descriptors) > BUFFERS_MAX:
            raise ConfigError(f"{len(descriptors)} host buffers; an endpoint's process takes {BUFFERS_MAX}")
        self._wire = Wire(self._process.socket)
        with suppress(OSError):  # a process that is gone is seen below
            socket.send_fds(self._process.socket, [b"\0"], descriptors)
        self._wire.send(
            ProcessSetup(self.config, self._process.transport, tuple(buffer for buffer, _ in shared))
        )
        opened = self._wire.receive()
        if isinstance(opened, Reply) and opened.error is None:
            address, epoch = opened.result
            return address, epoch
        self._process.close()
        if isinstance(opened, Reply) and opened.error is not None:
            raise opened.error
        raise LocalProtocolError(
            f"the endpoint's process of rank {self.config.rank} ended before it was open; its output says why"
        )

    # Calls of the engine.

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self._address

    @property
    def registry(self) -> str | None:
        """The URL of the registry, hosted here or elsewhere; known once it is ready."""
        return self._registry

    def wait_ready(self, timeout_s: float = 30.0) -> bool:
        """Whether this rank is attached and, where the coordinator is hosted, every other one too, after
        waiting; False at once if the endpoint is over."""
        return self._serving.wait(timeout_s) and self._is_open

    def send(
        self, transfer_id: str, digest: Digest, progress_s: float | None = None, *, is_queued: bool = False
    ) -> Sending:
        """Source: begins to send this rank's part of a transfer."""
        self._check_open()
        check_transfer(transfer_id)
        if progress_s is not None:
            check_progress(progress_s)
        key = next(self._keys)
        sending = Sending(transfer_id, digest.num_tokens, self._sendings, _call_now, self._changed)
        self._handles[key] = sending
        self._sendings.add(sending, key)
        self._wire.send(Call("send", (transfer_id, digest, progress_s, is_queued), key))
        return sending

    def receive(self, request: Request) -> Receiving:
        """Target: asks for a transfer, with the pages of this rank or of several."""
        self._check_open()
        checked = request.checked(self.config.spec)
        key = next(self._keys)
        receiving = Receiving(
            checked.transfer,
            checked.source,
            lambda handle, text: self._wire.send(Call("abort", (text,), key)),
            self._changed,
        )
        receiving.claim = self._claims.take_unless_live(checked)
        self._handles[key] = receiving
        fence = self._sendings.name_fence(checked.fence)
        fields = None if fence is None else astuple(fence)
        self._wire.send(Call("receive", (replace(checked, fence=NOW),), key, fields))
        return receiving

    def decline(self, transfer_id: str, source: str, text: str) -> None:
        """Target: tells a source that there is no room for its transfer."""
        self._wire.send(Call("decline", (transfer_id, source, text)))

    def queue(self, transfer_id: str, source: str) -> None:
        """Target: tells a source that its transfer waits for room; again and again, while the queue moves."""
        self._wire.send(Call("queue", (transfer_id, source)))

    def on_change(self, callback: Callable[[Handle], None]) -> None:
        """Calls back on the endpoint's thread whenever a handle changed; it must neither block nor raise."""
        self._on_change = callback

    def assign(self, transfer_id: str, dp: int | None = None) -> int:
        """Source, where the coordinator is hosted: the dp group that prefills a transfer."""
        assigned: int = self._ask("assign", transfer_id, dp)
        return assigned

    def quarantined(self) -> dict[str, int]:
        """Target, where the coordinator is hosted: pages by transfer that wait for quiet."""
        pages: dict[str, int] = self._ask("quarantined")
        return pages

    def counts(self) -> dict[str, int]:
        """How much is under way on this rank and, where it is hosted, at the coordinator."""
        counts: dict[str, int] = self._ask("counts")
        return counts

    def close(self) -> None:
        """Ends this rank, and with the coordinator the instance, and the process."""
        self._is_open = False
        self._serving.set()
        self._wire.send(Call("close"))
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S_MAX)
            self._wire.hang_up()
            self._thread.join()
        self._wire.close()
        self._process.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        self._check_open()
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        self._wire.send(Call(method, arguments, number=number))
        return answer.result(ANSWER_S_MAX)

    # What the process says.

    def _listen(self) -> None:
        text = ""
        while (event := self._wire.receive()) is not None:
            match event:
                case Serving():
                    self.config = replace(self.config, epoch=event.epoch)
                    self._registry = event.registry
                    self._serving.set()
                case Changed():
                    self._update(event)
                case Reply():
                    answer = self._answers.pop(event.number)
                    if event.error is not None:
                        answer.set_exception(event.error)
                    else:
                        answer.set_result(event.result)
                case Over():
                    text = event.text
        was_open, self._is_open = self._is_open, False
        self._serving.set()
        text = text or f"the endpoint's process of rank {self.config.rank} ended"
        why = Why.PEER_LOST if was_open else Why.ABORTED
        cause = Cause(why, Stage.COPY, self.config.instance, self.config.rank, text)
        for handle in list(self._handles.values()):
            handle.conclude(Failed(cause))
        for answer in self._answers.values():
            answer.set_exception(LocalProtocolError(text))
        if was_open:
            self._on_end(text)

    def _update(self, event: Changed) -> None:
        handle = self._handles[event.key]
        if isinstance(handle, Sending):
            before = (handle.is_granted, handle.is_target_full)
            handle.session = event.session
            handle.is_granted, handle.is_target_full = event.is_granted, event.is_target_full
            handle.copies.extend(event.copies)
            handle.release_chunks(event.num_offered, event.reading)
            if event.withdrawn is not None and self._sendings.is_last_withdrawal(handle, event.withdrawal):
                handle.end_withdrawal(*event.withdrawn)
            if before != (handle.is_granted, handle.is_target_full) and event.outcome is None:
                self._changed(handle)
        elif isinstance(handle, Receiving) and event.early is not None and handle.early is None:
            handle.early = event.early
            self._changed(handle)
        if event.outcome is not None:
            handle.conclude(event.outcome)
        if event.is_released:
            del self._handles[event.key]
            if isinstance(handle, Sending):
                self._sendings.forget(handle)
            elif isinstance(handle, Receiving) and handle.claim is not None:
                self._claims.give_back(handle.claim)
            handle.release()

    def _changed(self, handle: Handle) -> None:
        self._on_change(handle)


def _call_now(job: Callable[[], None]) -> None:
    """The messages of a handle are sent by the thread that calls it."""
    job()


def _is_same(ids: Any, last: Ints) -> bool:
    return isinstance(ids, np.ndarray) and ids.shape == last.shape and bool((ids == last).all())


@cache
def _reductions() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions")
