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
from functools import cache
from typing import Any, NoReturn

import msgspec
from msgspec.structs import astuple

from baton.errors import BatonError
from baton.protocol.ledger import Rectangle
from baton.protocol.outcomes import Aux, Outcome, Waiting
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import CheckedPages, CopyTiming, Handle, Receiving, Sending
from baton.transport import NOW, CudaFence, Fence, HostFence, Transport, open_transport
from baton.transport.throttled import throttle

FOREVER_S = threading.TIMEOUT_MAX
BUFFERS_MAX = 253
"""Descriptors that the kernel passes with one message."""

Withdrawn = tuple[tuple[Rectangle, ...], tuple[Rectangle, ...], bool]
"""What `Sending.end_withdrawal` takes."""


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
class ProcessSetup:
    """The first message: configuration, transport and pools."""

    config: EndpointConfig
    transport: TransportConfig
    buffers: tuple[SharedBuffer, ...]


# Messages. They are pickled: each of the two processes trusts the other one.


class FenceName(msgspec.Struct, frozen=True):
    """A fence: of the host by its number, or an event of CUDA IPC, with its handle when it is new."""

    number: int
    is_cuda: bool = False
    device: int = 0
    handle: bytes = b""


class Call(msgspec.Struct, frozen=True):
    """A call of the engine: of a method of the endpoint or, with a key, of a handle."""

    method: str
    arguments: tuple[Any, ...] = ()
    key: int | None = None
    """Of the handle; `send` and `receive` open one under it."""
    fence: tuple[Any, ...] | None = None
    """The fields of the `FenceName` that a chunk or a request has to wait for."""
    number: int | None = None
    """Of the answer, where the engine waits for it."""


class Reply(msgspec.Struct, frozen=True):
    """The result of a call with a number, or what it raised; number 0 answers `ProcessSetup`."""

    number: int
    result: Any = None
    error: BatonError | None = None


class Serving(msgspec.Struct, frozen=True):
    """The rank is attached, and every other one where the coordinator is hosted."""

    epoch: int
    registry: str | None


class Changed(msgspec.Struct, frozen=True):
    """The state of a handle."""

    key: int
    is_granted: bool = False
    is_target_full: bool = False
    session: int = 0
    early: Aux | None = None
    outcome: Outcome | None = None
    num_offered: int = 0
    """Chunks that it has; of those, `reading` are still read."""
    reading: tuple[int, ...] = ()
    withdrawn: Withdrawn | None = None
    """Once a withdrawal is quiet: how `Sending.end_withdrawal` was called."""
    withdrawal: int = 0
    """The number of that withdrawal, which the engine gave it."""
    copies: tuple[CopyTiming, ...] = ()
    is_released: bool = False


class Over(msgspec.Struct, frozen=True):
    """The instance has ended."""

    text: str


class Wire:
    """Messages over one end of the socket pair, each after its length; any thread may send.

    A call travels as a tuple of its fields, which the engine's thread pickles in a quarter of the time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Does nothing if the other end is gone: the thread that receives sees it."""
        raw = pickle.dumps(astuple(message) if isinstance(message, Call) else message)
        with suppress(OSError), self._lock:
            self._socket.sendall(len(raw).to_bytes(4, "little") + raw)

    def receive(self) -> Any:
        """The next message; None once one of the ends has closed."""
        try:
            head = self._file.read(4)
            num_bytes = int.from_bytes(head, "little")
            raw = self._file.read(num_bytes)
        except (OSError, ValueError):
            return None
        if len(head) < 4 or len(raw) < num_bytes:
            return None
        message = pickle.loads(raw)
        return Call(*message) if isinstance(message, tuple) else message

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

    def __init__(self, wire: Wire, hello: ProcessSetup, descriptors: list[int]) -> None:
        self._wire = wire
        transport = hello.transport.open()
        pools = {
            buffer.name: _map_tensor(buffer)
            if buffer.tensor
            else transport.adopt(descriptors.pop(0), buffer.num_bytes)
            for buffer in hello.buffers
        }
        self._handles: dict[int, Handle] = {}
        self._keys: dict[Handle, int] = {}
        self._sent: dict[int, Changed] = {}
        self._lock = threading.Lock()
        """A handle may change before its key is known."""
        self._tables: dict[Handle, CheckedPages] = {}
        """The table of the last offer."""
        self._withdrawals: dict[Handle, int] = {}
        """The number of the last withdrawal."""
        self._fences: dict[int, HostFence] = {}
        self._events: dict[int, Any] = {}
        self.endpoint = Endpoint(hello.config, pools, transport, on_end=self._over)
        self.endpoint.on_change(self._changed)
        self._wire.send(Reply(0, (self.endpoint.address, self.endpoint.epoch)))
        threading.Thread(target=self._wait_serving, name="baton-serving", daemon=True).start()

    def _wait_serving(self) -> None:
        if self.endpoint.wait_ready(FOREVER_S):
            self._wire.send(Serving(self.endpoint.epoch, self.endpoint.registry))

    def _over(self, text: str) -> NoReturn:
        self._wire.send(Over(text))
        os._exit(1)

    def run(self) -> None:
        """Executes calls until the engine closes the endpoint, or is gone."""
        while (call := self._wire.receive()) is not None:
            if call.method == "close":
                self.endpoint.close()
                return
            try:
                result = self._execute(call)
            except BatonError as error:
                if call.number is None:
                    self._over(f"{call.method}: {error}")
                self._wire.send(Reply(call.number, error=error))
            else:
                if call.number is not None:
                    self._wire.send(Reply(call.number, result))
        os._exit(1)

    def _execute(self, call: Call) -> object:
        match call:
            case Call("fence_ready", (number,)):
                if (fence := self._fences.pop(number, None)) is not None:
                    fence.set()
            case Call("send", (transfer, digest, progress_s, is_queued), int(key)):
                self._open(key, self.endpoint.send(transfer, digest, progress_s, is_queued=is_queued))
            case Call("receive", (request,), int(key)):
                self._open(key, self.endpoint.receive(replace(request, fence=self._fence(call.fence))))
            case Call(_, _, None):
                return getattr(self.endpoint, call.method)(*call.arguments)
            case Call("abort", (text,), int(key)):
                if isinstance(handle := self._handles.get(key), Sending | Receiving):
                    handle.abort(text)
            case Call(method, arguments, int(key)):
                # Also where the transfer is over: the handle of an event comes once, and others will use it.
                awaited = self._fence(call.fence)
                sending = self._handles.get(key)
                if not isinstance(sending, Sending) or not isinstance(sending.state, Waiting):
                    return None  # it has ended, which the engine does not know yet
                # What follows a withdrawal that is over resumes it, unless it ends the transfer.
                if (withdrawal := sending.withdrawal) is not None and withdrawal.is_quiet:
                    sending.resume()
                match method:
                    case "ready":
                        layers, tokens, table = arguments
                        if table is not None:
                            self._tables[sending] = sending.read_pages(table)
                        sending.ready(layers, tokens, self._tables[sending], awaited)
                    case "withdraw":
                        # Before it can become quiet: the message that it is quiet has this number.
                        (self._withdrawals[sending],) = arguments
                        sending.withdraw()
                    case _:
                        getattr(sending, method)(*arguments)
        return None

    def _open(self, key: int, handle: Handle) -> None:
        with self._lock:
            self._handles[key], self._keys[handle] = handle, key
            self._sent[key] = Changed(key)
        self._changed(handle)

    def _fence(self, fields: tuple[Any, ...] | None) -> Fence:
        if fields is None:
            return NOW
        name = FenceName(*fields)
        if not name.is_cuda:
            fence = self._fences[name.number] = HostFence()
            return fence
        if name.handle:
            self._events[name.number] = torch().cuda.Event.from_ipc_handle(name.device, name.handle)
        return HostWait(CudaFence(self._events[name.number]))

    def _changed(self, handle: Handle) -> None:
        """Sends state changes to the engine; copy progress only after an outcome or withdrawal."""
        with self._lock:
            key = self._keys.get(handle)
            if key is None:
                return
            change = self._change(key, handle)
            if change == self._sent[key]:
                return
            self._sent[key] = change
            if handle.is_released:
                del self._handles[key], self._keys[handle], self._sent[key]
                self._tables.pop(handle, None)
                self._withdrawals.pop(handle, None)
                if isinstance(handle, Sending):
                    change = msgspec.structs.replace(change, copies=tuple(handle.copies))
            self._wire.send(change)

    def _change(self, key: int, handle: Handle) -> Changed:
        outcome = None if isinstance(handle.state, Waiting) else handle.state
        if not isinstance(handle, Sending):
            early = handle.early if isinstance(handle, Receiving) else None
            return Changed(key, early=early, outcome=outcome, is_released=handle.is_released)
        # The number first: with it, the withdrawal before is already resumed.
        number = self._withdrawals.get(handle, 0)
        withdrawal = handle.withdrawal
        is_withdrawn = withdrawal is not None and withdrawal.is_quiet and outcome is None
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
            withdrawn=handle.withdrawn() if is_withdrawn else None,
            withdrawal=number if is_withdrawn else 0,
            is_released=handle.is_released,
        )


@cache
def torch() -> Any:
    """torch takes seconds to import, and only device memory needs it."""
    return importlib.import_module("torch")


def _map_tensor(buffer: SharedBuffer) -> Any:
    rebuild, arguments = pickle.loads(buffer.tensor)
    tensor = rebuild(*arguments)
    torch().cuda.set_device(tensor.device)
    return tensor


def main() -> None:
    """Runs the endpoint of the process that has the other end of the descriptor."""
    # An interrupt of the terminal is the engine's business; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    _, descriptors, _, _ = socket.recv_fds(sock, 1, BUFFERS_MAX)
    wire = Wire(sock)
    hello = wire.receive()
    if hello is None:
        os._exit(1)  # the engine ended before it had an endpoint
    try:
        server = EndpointServer(wire, hello, descriptors)
    except BatonError as error:
        wire.send(Reply(0, error=error))
        os._exit(1)
    server.run()
