"""What a transport is measured against: the same spans, moved by the barest means in the same run.

`memcpy` for every transport; for tcp, mooncake and nixl also their own sockets or library, called as their
users call them; for cuda_ipc a copy inside the GPU. A baseline is a context manager; `once()` moves the spans
and returns when they have arrived.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
from typing import Any, Self

import numpy as np

from baton.bench.target_process import on_gpu
from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.supervisor import ChildProcess, reply
from baton.transport.library.base import import_native
from baton.transport.tcp import CONFIG

IOV_MAX = 512
HOST = "127.0.0.1"


class Baseline:
    """The barest way to move some spans, into memory of a child process if there is one."""

    child: ChildProcess | None = None

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        raise NotImplementedError

    def once(self) -> None:
        """Moves the spans, and returns when they have arrived."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            self.child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_child(self, name: str, *arguments: int) -> ChildProcess:
        """Starts the receiving side: this module as a script."""
        argv = [sys.executable, "-m", __name__, name, *map(str, arguments)]
        self.child = ChildProcess(f"the receiver of {name}", argv, has_stdin=True)
        return self.child


class Memcpy(Baseline):
    """One thread, one contiguous numpy copy of as many bytes."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.source = np.ones(spans.num_bytes, dtype=np.uint8)
        self.target = np.zeros(spans.num_bytes, dtype=np.uint8)

    def once(self) -> None:
        np.copyto(self.target, self.source)


class BareSockets(Baseline):
    """sendmsg and recv_into over as many streams as the tcp transport uses.

    Both ends know the spans beforehand; nothing is checked or framed.
    """

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.spans = spans
        self.source = np.ones(num_bytes, dtype=np.uint8)
        self.num_streams = CONFIG().num_streams
        child = self.start_child("tcp", num_bytes, self.num_streams)
        child.send({"target": spans.target.tolist(), "length": spans.length.tolist()})
        port = child.receive()
        self.streams = [socket.create_connection((HOST, port)) for _ in range(self.num_streams)]
        for stream in self.streams:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def once(self) -> None:
        threads = [threading.Thread(target=self._send, args=(i,)) for i in range(self.num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, index: int) -> None:
        """Sends one stream's spans and waits for its byte of acknowledgement."""
        own, stream = slice(index, None, self.num_streams), self.streams[index]
        views = _views(self.source, self.spans.source[own].tolist(), self.spans.length[own].tolist())
        at = 0
        while at < len(views):
            sent = stream.sendmsg(views[at : at + IOV_MAX])
            while sent:
                if sent < len(views[at]):
                    views[at] = views[at][sent:]
                    break
                sent -= len(views[at])
                at += 1
        stream.recv(1)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        super().close()


def _views(buffer: np.ndarray, offsets: list[int], lengths: list[int]) -> list[memoryview]:
    raw = memoryview(buffer)
    return [raw[at : at + length] for at, length in zip(offsets, lengths, strict=True)]


def _receive_tcp(num_bytes: int, num_streams: int) -> None:
    spans = json.loads(sys.stdin.readline())
    buffer = np.zeros(num_bytes, dtype=np.uint8)
    with socket.create_server((HOST, 0), backlog=num_streams) as server:
        reply(server.getsockname()[1])
        streams = [server.accept()[0] for _ in range(num_streams)]

    def receive(index: int) -> None:
        own, stream = slice(index, None, num_streams), streams[index]
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                for view in _views(buffer, spans["target"][own], spans["length"][own]):
                    while len(view):
                        count = stream.recv_into(view)
                        if not count:
                            return
                        view = view[count:]  # noqa: PLW2901
                stream.sendall(b"k")
        except OSError:
            stream.close()

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class BareMooncake(Baseline):
    """Mooncake's batch_transfer_sync_write of all spans at once."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        received = self.start_child("mooncake", num_bytes).receive()
        self.engine, self.session = _mooncake_engine(), received["session"]
        self.memory = np.ones(num_bytes, dtype=np.uint8)
        self.engine.register_memory(self.memory.ctypes.data, num_bytes)
        self.reads = (spans.source + self.memory.ctypes.data).tolist()
        self.writes = (spans.target + received["address"]).tolist()
        self.lengths = spans.length.tolist()

    def once(self) -> None:
        code = self.engine.batch_transfer_sync_write(self.session, self.reads, self.writes, self.lengths)
        if code:
            raise TransportError(f"mooncake returned {code}")


def _mooncake_engine() -> Any:
    engine = import_native(("mooncake.engine",)).TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "none"):
        raise TransportError("mooncake cannot be initialised over tcp")
    return engine


def _receive_mooncake(num_bytes: int) -> None:
    engine, memory = _mooncake_engine(), np.zeros(num_bytes, dtype=np.uint8)
    engine.register_memory(memory.ctypes.data, num_bytes)
    reply({"session": f"{HOST}:{engine.get_rpc_port()}", "address": memory.ctypes.data})
    sys.stdin.read()


class BareNixl(Baseline):
    """NIXL's createXferReq once, then post and poll until it is done."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        received = self.start_child("nixl", num_bytes).receive()
        self.bindings, self.agent = _nixl_agent("bare-source", has_thread=False)
        self.memory = np.ones(num_bytes, dtype=np.uint8)
        _nixl_register(self.bindings, self.agent, self.memory)
        remote = self.agent.loadRemoteMD(bytes.fromhex(received["metadata"]))
        reads = self._descriptors(spans.source + self.memory.ctypes.data, spans)
        writes = self._descriptors(spans.target + received["address"], spans)
        self.transfer = self.agent.createXferReq(self.bindings.NIXL_WRITE, reads, writes, remote, b"", [])

    def _descriptors(self, start: np.ndarray, spans: Spans) -> Any:
        rows = np.zeros((len(spans), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = start, spans.length
        return self.bindings.nixlXferDList(self.bindings.DRAM_SEG, rows)

    def once(self) -> None:
        self.agent.postXferReq(self.transfer, b"")
        while (status := self.agent.getXferStatus(self.transfer)) == self.bindings.NIXL_IN_PROG:
            pass
        if status != self.bindings.NIXL_SUCCESS:
            raise TransportError(f"nixl returned {status}")


def _nixl_agent(name: str, *, has_thread: bool) -> tuple[Any, Any]:
    bindings: Any = import_native(("nixl_cu13._bindings", "nixl_cu12._bindings"))
    config = bindings.nixlAgentConfig()
    config.useProgThread = has_thread
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = 100_000
    agent = bindings.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    return bindings, agent


def _nixl_register(bindings: Any, agent: Any, memory: np.ndarray) -> Any:
    ranges = bindings.nixlRegDList(bindings.DRAM_SEG, [(memory.ctypes.data, len(memory), 0, "")])
    agent.registerMem(ranges, [])
    return ranges


def _receive_nixl(num_bytes: int) -> None:
    bindings, agent = _nixl_agent("bare-target", has_thread=True)
    memory = np.zeros(num_bytes, dtype=np.uint8)
    ranges = _nixl_register(bindings, agent, memory)
    metadata = agent.getLocalPartialMD(ranges, True, [])
    reply({"metadata": bytes(metadata).hex(), "address": memory.ctypes.data})
    sys.stdin.read()


class DeviceCopy(Baseline):
    """One contiguous copy of as many bytes on a GPU, by torch."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.cuda = importlib.import_module("torch").cuda
        self.source = on_gpu(np.ones(spans.num_bytes, dtype=np.uint8))
        self.target = on_gpu(np.zeros(spans.num_bytes, dtype=np.uint8))

    def once(self) -> None:
        self.target.copy_(self.source)
        self.cuda.current_stream().synchronize()


BASELINES: dict[str, type[Baseline]] = {
    "memcpy": Memcpy,
    "cuda_ipc": DeviceCopy,
    "tcp": BareSockets,
    "mooncake": BareMooncake,
    "nixl": BareNixl,
}

if __name__ == "__main__":
    receivers = {"tcp": _receive_tcp, "mooncake": _receive_mooncake, "nixl": _receive_nixl}
    receivers[sys.argv[1]](*map(int, sys.argv[2:]))
    os._exit(0)  # a library's threads must not keep a measured machine busy
