"""A bare sendmsg/recv_into loop over as many streams as the tcp transport uses.

Both ends know the spans beforehand and nothing is checked or framed: what the sockets themselves can do.
"""

from __future__ import annotations

import json
import socket
import sys
import threading

import numpy as np

from baton.bench.baselines.child import Baseline, Child
from baton.plan.steps import Spans
from baton.transport.tcp import CONFIG

IOV_MAX = 512
HOST = "127.0.0.1"


def _views(buffer: np.ndarray, offsets: list[int], lengths: list[int]) -> list[memoryview]:
    raw = memoryview(buffer)
    return [raw[at : at + length] for at, length in zip(offsets, lengths, strict=True)]


def _send(stream: socket.socket, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        sent = stream.sendmsg(views[at : at + IOV_MAX])
        while sent:
            if sent < len(views[at]):
                views[at] = views[at][sent:]
                break
            sent -= len(views[at])
            at += 1


def _receive(stream: socket.socket, views: list[memoryview]) -> None:
    for view in views:
        while len(view):
            count = stream.recv_into(view)
            if not count:
                raise ConnectionError("the sender is gone")
            view = view[count:]  # noqa: PLW2901


class Bare(Baseline):
    """The sending side, with the receiving side in a process of its own."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.spans = spans
        self.source = np.ones(num_bytes, dtype=np.uint8)
        self.num_streams = CONFIG().num_streams
        self.streams: list[socket.socket] = []
        self.child = Child(__name__, str(num_bytes), str(self.num_streams))
        self.child.tell({"target": spans.target.tolist(), "length": spans.length.tolist()})
        port = self.child.told()
        for _ in range(self.num_streams):
            stream = socket.create_connection((HOST, port))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.streams.append(stream)

    def once(self) -> None:
        """Sends every stream's spans and waits for its byte of acknowledgement."""
        threads = [threading.Thread(target=self._one, args=(i,)) for i in range(self.num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, index: int) -> None:
        mine = slice(index, None, self.num_streams)
        views = _views(self.source, self.spans.source[mine].tolist(), self.spans.length[mine].tolist())
        _send(self.streams[index], views)
        self.streams[index].recv(1)

    def close(self) -> None:
        """Ends the streams and the child."""
        for stream in self.streams:
            stream.close()
        super().close()


def _serve(num_bytes: int, num_streams: int) -> None:
    said = json.loads(sys.stdin.readline())
    buffer = np.zeros(num_bytes, dtype=np.uint8)
    with socket.create_server((HOST, 0), backlog=num_streams) as server:
        print(f"baton {server.getsockname()[1]}", flush=True)
        streams = [server.accept()[0] for _ in range(num_streams)]

    def run(index: int) -> None:
        mine = slice(index, None, num_streams)
        stream = streams[index]
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                _receive(stream, _views(buffer, said["target"][mine], said["length"][mine]))
                stream.sendall(b"k")
        except OSError:
            stream.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
