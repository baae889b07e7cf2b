"""Those who speak to a port without being asked to: raw bytes over TCP, and what is heard in answer."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

HEAR_S = 10.0
_LISTENS = "0A"


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a port said before it closed, or before the stranger stopped listening."""

    raw: bytes
    is_closed: bool

    @property
    def statuses(self) -> list[int]:
        """Of all HTTP answers in it."""
        return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.raw)]


def throw(port: int, *pieces: bytes, hear_s: float = HEAR_S, is_half_closed: bool = False) -> Heard:
    """Sends bytes and listens until the port closes, or for a time."""
    with socket.create_connection(("127.0.0.1", port), timeout=HEAR_S) as sock:
        for piece in pieces:
            try:
                sock.sendall(piece)
            except OSError:
                break
        if is_half_closed:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        return hear(sock, hear_s)


def greets(port: int, hear_s: float = 1.0) -> bool:
    """Whether a port speaks first, or turns away who says nothing that it knows."""
    heard = throw(port, hear_s=hear_s)
    return bool(heard.raw) or heard.is_closed


def hear(sock: socket.socket, hear_s: float) -> Heard:
    """What comes until the end, at most for a time after the last piece."""
    sock.settimeout(hear_s)
    raw = b""
    while True:
        try:
            piece = sock.recv(1 << 16)
        except TimeoutError:
            return Heard(raw, is_closed=False)
        except OSError:
            return Heard(raw, is_closed=True)
        if not piece:
            return Heard(raw, is_closed=True)
        raw += piece


def request(path: str, body: Any, *headers: str, length: int | None = None) -> bytes:
    """A request as it stands on the wire; `length` is what it claims to have."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if not any(header.startswith("Connection:") for header in headers):
        headers = (*headers, "Connection: close")
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: baton",
        "Content-Type: application/json",
        f"Content-Length: {len(raw) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def mutated(raw: bytes, chance: Random) -> bytes:
    """The same with a few bytes changed, cut out, doubled or put in."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 20))
            case _:
                data[place:place] = data[place : place + chance.randint(1, 40)]
    return bytes(data)


STRANGE_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**70,
    -(2**63) - 1,
    1e308,
    0.1,
    "",
    "x",
    "\x00",
    "\ud800",
    "\r\nX: y",
    "a" * 3000,
    [],
    {},
    [[]],
    [None],
    [[1, 2], [3]],
    [1, "x"],
    ["x", 1],
    [[[5]]],
    {"a": {"b": []}},
    ["x"] * 300,
    {str(number): number for number in range(400)},
)


def strange(body: dict[str, Any], names: list[str], chance: Random) -> dict[str, Any]:
    """A body with strange values in one to three of these fields."""
    changed = dict(body)
    for name in chance.sample(names, chance.randint(1, 3)):
        changed[name] = chance.choice(STRANGE_VALUES)
    return changed


class Recorder:
    """A relay to a port that keeps what the dialler of each connection said."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.said: list[bytearray] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target), timeout=HEAR_S)
            except OSError:
                return
            far.settimeout(None)
            self._open += [near, far]
            kept = bytearray()
            self.said.append(kept)
            threading.Thread(target=self._pass_on, args=(near, far, kept), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, bytearray()), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                kept += piece
                target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends every connection."""
        for sock in (self._server, *self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def recorder(port: int) -> Iterator[Recorder]:
    """A relay that ends with the block."""
    relay = Recorder(port)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def crowd(port: int, num_sockets: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say something, or nothing, and stay."""
    found: list[socket.socket] = []
    try:
        for _ in range(num_sockets):
            sock = socket.create_connection(("127.0.0.1", port), timeout=HEAR_S)
            found.append(sock)
            with suppress(OSError):
                sock.sendall(say)
        yield found
    finally:
        for sock in found:
            sock.close()


def frames(chance: Random) -> Iterator[bytes]:
    """First words in the manner of a framed protocol, none of which is one."""
    yield b""
    for size in (1, 3, 4, 5, 64, 4096, 70_000, 300_000):
        yield chance.randbytes(size)
    for length in (0, 1, 16, 65_535, 65_536, 1 << 24, (1 << 31) - 1, (1 << 32) - 1):
        yield struct.pack(">I", length) + chance.randbytes(min(length, 64))
        yield struct.pack("<I", length) + chance.randbytes(min(length, 64))
        yield struct.pack(">Q", length) + chance.randbytes(8)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield struct.pack(">I", 2) + b"\xc1\xc1"
    yield struct.pack(">I", 6) + b"\xdd\xff\xff\xff\xff\xff"
