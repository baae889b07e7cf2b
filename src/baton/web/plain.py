"""Requests of one plain form, read without ceremony, and the bytes of their answers.

A POST to a known path with a Content-Length, on a connection that is kept: what nearly every client sends.
Whatever differs in the slightest is left to the HTTP server behind, which knows all of HTTP/1.1: nothing is
read here in a way of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

import msgspec

HEAD_BYTES_MAX = 8000
_NUM_HEADERS_MAX = 100
HEAD_END = b"\r\n\r\n"
_METHOD = b"POST "
_FORM = re.compile(
    rb"POST (/[\w/.-]+) HTTP/1\.1\r\n(?:[\w!#$%&'*+.^`|~-]+:[\t\x20-\x7e]*\r\n)+\r\n", re.ASCII
)
_UNUSUAL = frozenset((b"content-encoding", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
_LENGTH = re.compile(rb"\d{1,9}", re.ASCII)
_FIXED = b"Cache-Control: no-store\r\nServer: baton\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Head(msgspec.Struct, frozen=True):
    """The head of a plain request."""

    path: str
    authorization: str
    num_body_bytes: int
    num_bytes: int
    """Of the head itself."""


class Reply(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class Outlet(Protocol):
    """Where an answer goes: whole, or as a stream that is begun by its first bytes."""

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""

    async def send(self, reply: Reply) -> None:
        """All of it."""

    async def write(self, data: bytes, identity: str, *, is_last: bool = False) -> None:
        """More of a stream, in the order of the calls; waits where the client is slow."""


def is_likely(data: bytes, paths: frozenset[bytes]) -> bool:
    """Whether these bytes may be, or become, the beginning of a plain request to one of these paths."""
    start = data[: len(_METHOD)]
    if start != _METHOD[: len(start)]:
        return False
    path, end, _ = data[len(_METHOD) : HEAD_BYTES_MAX].partition(b" ")
    return path in paths if end else any(each.startswith(path) for each in paths)


def read_head(data: bytes) -> Head | None:
    """The head at the beginning of these bytes, which hold the end of one; None where it is not plain."""
    found = _FORM.match(data)
    if found is None or found.end() > HEAD_BYTES_MAX:
        return None
    lines = found[0].split(b"\r\n")[1:-2]
    headers = dict(_fields(lines))
    is_usual = len(headers) == len(lines) <= _NUM_HEADERS_MAX and _UNUSUAL.isdisjoint(headers)
    if not is_usual:
        return None
    length = headers.get(b"content-length", b"") if headers.get(b"host") else b""
    is_kept = headers.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    if not is_kept or not _LENGTH.fullmatch(length):
        return None
    authorization = headers.get(b"authorization", b"").decode("ascii")
    return Head(found[1].decode("ascii"), authorization, int(length), found.end())


def _fields(lines: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for line in lines:
        name, _, value = line.partition(b":")
        yield name.lower(), value.strip(b" \t")


def whole(reply: Reply) -> bytes:
    """The bytes of a whole answer."""
    head = _head(reply.status, reply.content_type, reply.headers)
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(reply.body), reply.body)


def stream_head(content_type: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    """What goes before the first chunk of a stream."""
    return _head(200, content_type, headers) + _CHUNKED


def chunk(data: bytes) -> bytes:
    """A piece of a stream."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(status: int, content_type: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [_start(status), _FIXED, _dates.line(), b"Content-Type: ", _text(content_type), b"\r\n"]
    for name, value in headers:
        lines += (name.encode("ascii"), b": ", _text(value), b"\r\n")
    return b"".join(lines)


def _text(value: str) -> bytes:
    """A header's value; one with a line of its own in it would be more than a value."""
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"header value {value!a} has characters that no header may have")
    return value.encode("ascii")


def _start(status: int) -> bytes:
    line = _STARTS.get(status)
    if line is None:
        line = f"HTTP/1.1 {status} \r\n".encode("ascii")
    return line


_STARTS = {int(each): f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode("ascii") for each in HTTPStatus}


class _Dates:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n".encode("ascii")
        return self._line


_dates = _Dates()
