"""The process that runs an endpoint beside its engine, and the messages between the two.

A rank's interpreter launches kernels. An endpoint inside it takes turns with that: it binds, submits, polls
and answers for every group of layers. Here it lives in a process of its own, and the engine only says what is
computed: one message and, on a GPU, one event for each group. `baton.session.remote` is the engine's half.

The engine's process starts this one with one end of a socket pair. Pools are shared, not copied: host memory
as descriptors of memfds, device memory by CUDA IPC. A fence is an event of CUDA IPC, or a number that a later
message sets. The two share their fate: each ends when the other closes the socket, and the kernel does that
for a process that is killed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import msgspec
import numpy as np

from baton.errors import BatonError
from baton.plan.tokens import Ints
from baton.protocol.ledger import Rectangle
from baton.protocol.outcomes import Aux, Outcome, Waiting
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import CopyTiming, Digest, Handle, Receiving, Sending
from baton.transport import NOW, Bytes, CudaFence, Fence, HostFence, Transport, open_transport
from baton.transport.throttled import throttle

FOREVER_S = threading.TIMEOUT_MAX
BUFFERS_MAX = 253
"""Descriptors that the kernel passes with one message."""

Tables = dict[str, bytes]
"""Page ids by group, as the bytes of int64 arrays."""


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Which transport the process opens, and the speed of a simulated link before it, 0 for none."""

    name: str
    options: Mapping[str, Any]
    link_bytes_per_s: float = 0.0

    def open(self) -> Transport:
        transport = open_transport(self.name, **self.options)
        if not self.link_bytes_per_s:
            return transport
        return throttle(transport, bytes_per_s=self.link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A pool as the other process finds it: a memfd that travels with the message, or a tensor on a GPU."""

    name: str
    num_bytes: int
    tensor: bytes = b""
    """Pickled: how torch maps it by CUDA IPC; empty for host memory."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the process begins with."""

    config: EndpointConfig
    transport: TransportConfig
    buffers: tuple[SharedBuffer, ...]


# Messages of the engine. A key names a handle of this connection.


class FenceName(msgspec.Struct, frozen=True, array_like=True):
    """A fence: of the host by its number, or an event of CUDA IPC, with its handle when it is new."""

    number: int
    is_cuda: bool = False
    device: int = 0
    handle: bytes = b""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """`Endpoint.send`."""

    key: int
    transfer: str
    digest: Digest
    progress_s: float | None
    is_queued: bool


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """`Sending.ready`; without a table, that of the offer before."""

    key: int
    layers: tuple[int, int]
    tokens: tuple[int, int]
    table: Tables | None
    fence: FenceName | None


class QueueSending(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """`Sending.queued`."""

    key: int


class Seal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """`Sending.commit` and `Sending.finish`."""

    key: int
    aux: Aux | None
    is_finished: bool


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """`Sending.withdraw`; the next message about the handle resumes it."""

    key: int


class AbortHandle(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """`Sending.abort` and `Receiving.abort`."""

    key: int
    text: str


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """`Endpoint.receive`."""

    key: int
    request: bytes
    """A pickled `Request`; its fence is named beside it."""
    fence: FenceName | None


class DeclineTransfer(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """`Endpoint.decline`."""

    transfer: str
    source: str
    text: str


class QueueTransfer(msgspec.Struct, frozen=True, array_like=True, tag="queue"):
    """`Endpoint.queue`."""

    transfer: str
    source: str


class FenceReady(msgspec.Struct, frozen=True, array_like=True, tag="fence"):
    """A fence of the host is ready."""

    number: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A call that is answered: `counts`, `quarantined` or `assign`."""

    number: int
    call: str
    transfer: str = ""
    dp: int | None = None


class Shut(msgspec.Struct, frozen=True, array_like=True, tag="shut"):
    """`Endpoint.close`."""


Call = (
    Begin
    | Offer
    | QueueSending
    | Seal
    | Withdraw
    | AbortHandle
    | Receive
    | DeclineTransfer
    | QueueTransfer
    | FenceReady
    | Ask
    | Shut
)


# Messages of the endpoint.


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The endpoint listens, or `error` says why not."""

    address: str = ""
    epoch: int = 0
    error: str = ""


class Serving(msgspec.Struct, frozen=True, array_like=True, tag="serving"):
    """The rank is attached, and every other one where the coordinator is hosted."""

    epoch: int
    registry: str | None


class Quiet(msgspec.Struct, frozen=True, array_like=True):
    """A withdrawal is over; `baton.session.handles.Sending.end_withdrawal` has the meaning."""

    landed: tuple[Rectangle, ...]
    dropped: tuple[Rectangle, ...]
    is_committed: bool


class Changed(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """What a handle is now."""

    key: int
    is_granted: bool = False
    is_target_full: bool = False
    session: int = 0
    early: Aux | None = None
    outcome: Outcome | None = None
    num_offered: int = 0
    """Chunks that it has; of those, `reading` are still read."""
    reading: tuple[int, ...] = ()
    quiet: Quiet | None = None
    copies: tuple[CopyTiming, ...] = ()
    is_released: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer of an `Ask`."""

    number: int
    counts: dict[str, int]
    error: str = ""


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """The instance has ended."""

    text: str


Event = Opened | Serving | Changed | Answer | Over


class Wire:
    """Messages over one end of the socket pair, each after its length; any thread may send."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)

    def send(self, message: Call | Event) -> bool:
        """Whether the other end was there."""
        raw = self._encoder.encode(message)
        try:
            with self._lock:
                self._socket.sendall(len(raw).to_bytes(4, "little") + raw)
        except OSError:
            return False
        return True

    def receive(self) -> Any:
        """The next message; None once one of the ends has closed."""
        try:
            head = self._file.read(4)
            num_bytes = int.from_bytes(head, "little")
            raw = self._file.read(num_bytes)
        except (OSError, ValueError):
            return None
        return self._decoder.decode(raw) if len(head) == 4 and len(raw) == num_bytes else None

    def hang_up(self) -> None:
        """Both ends, and the thread that receives here, get to know."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._file.close()
        self._socket.close()


@dataclass(frozen=True, slots=True)
class HostWait:
    """An event of the engine's process, waited for by a thread.

    A stream that waits for an event of another process keeps the device busy looking at it: on an H200 the
    engine's own kernels then took 8 to 11 % longer at 4K tokens, and 2 % with a thread.
    """

    fence: CudaFence

    def is_ready(self) -> bool:
        return self.fence.is_ready()

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        self.fence.call_when_ready(callback)


class EndpointServer:
    """Runs an endpoint for the engine at the other end of a wire."""

    def __init__(self, sock: socket.socket) -> None:
        hello, descriptors = _receive_hello(sock)
        self._wire = Wire(sock, Call)
        transport = hello.transport.open()
        pools = {
            buffer.name: _map_tensor(buffer) if buffer.tensor else _map_host(transport, buffer, descriptors)
            for buffer in hello.buffers
        }
        self._handles: dict[int, Handle] = {}
        self._keys: dict[Handle, int] = {}
        self._told: dict[int, Changed] = {}
        self._lock = threading.Lock()
        """A handle may change before its key is known."""
        self._tables: dict[int, dict[str, Ints]] = {}
        self._fences: dict[int, HostFence] = {}
        self._events: dict[int, Any] = {}
        self.endpoint = Endpoint(hello.config, pools, transport, on_end=self._over)
        self.endpoint.on_change(self._changed)
        self._wire.send(Opened(self.endpoint.address, self.endpoint.epoch))
        threading.Thread(target=self._wait_serving, name="baton-serving", daemon=True).start()

    def _wait_serving(self) -> None:
        if self.endpoint.wait_ready(FOREVER_S):
            self._wire.send(Serving(self.endpoint.epoch, self.endpoint.registry))

    def _over(self, text: str) -> None:
        self._wire.send(Over(text))
        os._exit(1)

    def run(self) -> None:
        """Executes calls until the engine closes the endpoint, or is gone."""
        while (call := self._wire.receive()) is not None:
            if isinstance(call, Shut):
                self.endpoint.close()
                return
            try:
                self._execute(call)
            except BatonError as error:
                self._over(f"{type(call).__name__}: {error}")
        os._exit(1)

    def _execute(self, call: Call) -> None:
        match call:
            case Begin():
                send = partial(self.endpoint.send, call.transfer, call.digest, call.progress_s)
                self._open(call.key, partial(send, is_queued=call.is_queued))
            case Offer():
                self._offer(call)
            case QueueSending():
                if (sending := self._sending(call.key)) is not None:
                    sending.queued()
            case Seal():
                if (sending := self._sending(call.key)) is None:
                    return
                if call.is_finished:
                    assert call.aux is not None
                    sending.finish(call.aux)
                else:
                    sending.commit(call.aux)
            case Withdraw():
                # A second withdrawal without an offer in between.
                if (sending := self._sending(call.key)) is not None:
                    sending.withdraw()
                    self._changed(sending)
            case AbortHandle():
                handle = self._handles.get(call.key)
                if isinstance(handle, Sending | Receiving):
                    handle.abort(call.text)
            case Receive():
                # Pickles come from the process that started this one, and from nobody else.
                request = replace(pickle.loads(call.request), fence=self._fence(call.fence))
                self._open(call.key, partial(self.endpoint.receive, request))
            case DeclineTransfer():
                self.endpoint.decline(call.transfer, call.source, call.text)
            case QueueTransfer():
                self.endpoint.queue(call.transfer, call.source)
            case FenceReady():
                if (fence := self._fences.pop(call.number, None)) is not None:
                    fence.set()
            case Ask():
                self._answer(call)
            case Shut():
                raise AssertionError("`run` has seen to it")

    def _open(self, key: int, open_handle: Any) -> None:
        with self._lock:
            handle = self._handles[key] = open_handle()
            self._keys[handle] = key
            self._told[key] = Changed(key)
        self._changed(handle)

    def _sending(self, key: int) -> Sending | None:
        """The handle; what follows a withdrawal that is over resumes it."""
        handle = self._handles.get(key)
        if handle is None:
            return None  # released, and the engine does not know yet
        assert isinstance(handle, Sending)
        if (withdrawal := handle.withdrawal) is not None and withdrawal.is_quiet:
            handle.resume()
        return handle

    def _offer(self, call: Offer) -> None:
        if (sending := self._sending(call.key)) is None:
            return
        if call.table is not None:
            self._tables[call.key] = read_table(call.table)
        sending.ready(call.layers, call.tokens, self._tables[call.key], self._fence(call.fence))

    def _fence(self, name: FenceName | None) -> Fence:
        if name is None:
            return NOW
        if not name.is_cuda:
            fence = self._fences[name.number] = HostFence()
            return fence
        if name.handle:
            self._events[name.number] = _torch().cuda.Event.from_ipc_handle(name.device, name.handle)
        return HostWait(CudaFence(self._events[name.number]))

    def _answer(self, call: Ask) -> None:
        try:
            match call.call:
                case "assign":
                    counts = {"dp": self.endpoint.assign(call.transfer, call.dp)}
                case "quarantined":
                    counts = self.endpoint.quarantined()
                case _:
                    counts = self.endpoint.counts()
        except BatonError as error:
            self._wire.send(Answer(call.number, {}, str(error)))
        else:
            self._wire.send(Answer(call.number, counts))

    def _changed(self, handle: Handle) -> None:
        """Tells the engine what it waits for; that chunks were copied is told once the engine has to know."""
        with self._lock:
            key = self._keys.get(handle)
            if key is None:
                return
            change = self._change(key, handle)
            if change == self._told.get(key):
                return
            self._told[key] = change
            if handle.is_released:
                del self._handles[key], self._keys[handle], self._told[key]
                self._tables.pop(key, None)
                if isinstance(handle, Sending):
                    change = msgspec.structs.replace(change, copies=tuple(handle.copies))
            self._wire.send(change)

    def _change(self, key: int, handle: Handle) -> Changed:
        outcome = None if isinstance(handle.state, Waiting) else handle.state
        if not isinstance(handle, Sending):
            early = handle.early if isinstance(handle, Receiving) else None
            return Changed(key, early=early, outcome=outcome, is_released=handle.is_released)
        quiet: Quiet | None = None
        withdrawal = handle.withdrawal
        if withdrawal is not None and withdrawal.is_quiet and outcome is None:
            quiet = Quiet(*handle.withdrawn())
        is_read_watched = outcome is not None or withdrawal is not None
        num_offered, reading = handle.chunks_read() if is_read_watched else (0, ())
        return Changed(
            key,
            is_granted=handle.is_granted,
            is_target_full=handle.is_target_full,
            session=handle.session,
            outcome=outcome,
            num_offered=num_offered,
            reading=reading,
            quiet=quiet,
            is_released=handle.is_released,
        )


def read_table(table: Tables) -> dict[str, Ints]:
    """Page ids as they were before they travelled."""
    return {group: np.frombuffer(raw, dtype=np.int64) for group, raw in table.items()}


def pages_as_bytes(pages: Mapping[str, Ints]) -> Tables:
    """Page ids as they travel."""
    return {group: np.ascontiguousarray(ids, dtype=np.int64).tobytes() for group, ids in pages.items()}


@cache
def _torch() -> Any:
    """torch takes seconds to import, and only device memory needs it."""
    return importlib.import_module("torch")


def _map_tensor(buffer: SharedBuffer) -> Any:
    # Pickles come from the process that started this one, and from nobody else.
    rebuild, arguments = pickle.loads(buffer.tensor)
    tensor = rebuild(*arguments)
    _torch().cuda.set_device(tensor.device)
    return tensor


def _map_host(transport: Transport, buffer: SharedBuffer, descriptors: list[int]) -> Bytes:
    return transport.adopt(descriptors.pop(0), buffer.num_bytes)


def send_hello(sock: socket.socket, hello: Hello, descriptors: list[int]) -> None:
    """The first message: its length and the descriptors, then the rest."""
    raw = pickle.dumps(hello)
    socket.send_fds(sock, [len(raw).to_bytes(8, "little")], descriptors)
    sock.sendall(raw)


def _receive_hello(sock: socket.socket) -> tuple[Hello, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(sock, 8, BUFFERS_MAX)
    raw = bytearray()
    while not head or len(raw) < int.from_bytes(head, "little"):
        part = sock.recv(1 << 16)
        if not part:
            os._exit(1)  # the engine ended before it had an endpoint
        raw += part
    return cast(Hello, pickle.loads(raw)), descriptors


def main() -> None:
    """Runs the endpoint of the process that has the other end of the descriptor."""
    # An interrupt of the terminal is the engine's business; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        server = EndpointServer(sock.dup())
    except BatonError as error:
        Wire(sock, Call).send(Opened(error=str(error)))
        os._exit(1)
    sock.close()
    server.run()
