"""A client that costs little: one fixed request, over and over, on connections that are kept open.

For routers in front of dummy instances. The client of `baton bench serve` would take more of the cores there
than the router that is measured.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from baton.bench.serve.client import WORDS
from baton.errors import EngineError

HEAD_END = b"\r\n\r\n"
ANSWER_S_MAX = 30.0
QUICKACK = getattr(socket, "TCP_QUICKACK", None)


@dataclass(frozen=True, slots=True)
class Burst:
    """Many equal requests, as many at a time as there were connections."""

    num_ok: int
    num_failed: int
    wall_s: float
    cpu_s: float
    """Processor time of the client."""
    times_s: tuple[float, ...]

    @property
    def per_s(self) -> float:
        """Requests a second with status 200."""
        return self.num_ok / self.wall_s if self.wall_s > 0 else 0.0


def request_bytes(url: str, *, is_streamed: bool) -> bytes:
    """The bytes of a request to this server."""
    # Text, since sglang-router takes no token ids.
    prompt = " ".join(WORDS[:16])
    body = msgspec.json.encode(
        {"model": "dummy", "prompt": prompt, "max_tokens": 8, "stream": is_streamed, "temperature": 0.0}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class LoadConnection(asyncio.Protocol):
    """A connection with at most one request on it."""

    def __init__(self) -> None:
        self._rest = b""
        self._answered: asyncio.Future[bool] | None = None
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket = transport.get_extra_info("socket")

    def _acknowledge(self) -> None:
        """Acknowledges at once: a router that leaves Nagle's algorithm on would lose 40 ms per stream."""
        if QUICKACK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """Sends a request; the result is whether the complete answer had status 200."""
        assert self._transport is not None
        self._rest = b""
        self._answered = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._answered.set_result(False)
        else:
            self._acknowledge()
            self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._acknowledge()
        self._rest += data
        if self._answered is not None and not self._answered.done() and is_complete(self._rest):
            self._answered.set_result(self._rest.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(False)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()


def is_complete(answer: bytes) -> bool:
    """Whether a response is complete, by its length or its last chunk."""
    end = answer.find(HEAD_END)
    if end < 0:
        return False
    head = answer[:end].lower()
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        return len(answer) - end - len(HEAD_END) >= length
    return answer.endswith(b"\r\n0\r\n\r\n")


async def _connect(url: str) -> LoadConnection:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        _, line = await loop.create_connection(LoadConnection, parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise EngineError(f"{url} cannot be reached: {error.strerror or error}") from None
    return line


async def take_turns(urls: dict[str, str], num_rounds: int, *, is_streamed: bool) -> dict[str, list[float]]:
    """Seconds of single requests, one after another; each round asks every server once, in changing order."""
    lines = {name: await _connect(url) for name, url in urls.items()}
    requests = {name: request_bytes(url, is_streamed=is_streamed) for name, url in urls.items()}
    times_s: dict[str, list[float]] = {name: [] for name in urls}
    names = list(urls)
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            start_s = perf_counter()
            is_ok = await asyncio.wait_for(lines[name].ask(requests[name]), ANSWER_S_MAX)
            if not is_ok:
                raise EngineError(f"{name} at {urls[name]} did not answer 200 to a request at concurrency 1")
            times_s[name].append(perf_counter() - start_s)
    for line in lines.values():
        line.close()
    return times_s


async def send_burst(url: str, concurrency: int, wall_s: float, *, is_streamed: bool) -> Burst:
    """Sends as many requests as are answered in this time."""
    lines = [await _connect(url) for _ in range(concurrency)]
    request = request_bytes(url, is_streamed=is_streamed)
    times_s: list[float] = []
    num_failed = 0
    begun_s, cpu_s = perf_counter(), process_time()

    async def one(line: LoadConnection) -> None:
        nonlocal num_failed
        while (start_s := perf_counter()) < begun_s + wall_s:
            is_ok = await line.ask(request)
            if not is_ok:
                num_failed += 1
                return
            times_s.append(perf_counter() - start_s)

    async with asyncio.timeout(wall_s + ANSWER_S_MAX):
        await asyncio.gather(*(one(line) for line in lines))
    taken_s, used_s = perf_counter() - begun_s, process_time() - cpu_s
    for line in lines:
        line.close()
    return Burst(len(times_s), num_failed, taken_s, used_s, tuple(times_s))
