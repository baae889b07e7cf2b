"""An HTTP/1.1 response from bytes as they come, without a socket."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

HEAD_BYTES_MAX = 64 << 10
_LINE_BYTES_MAX = 4 << 10
_NEEDS_LINE = -1
_NEEDS_BREAK = -2
_NEEDS_TRAILER = -3
_UNTIL_CLOSE = -4


class BadResponse(Exception):  # noqa: N818  (its text becomes the cause that a client is told)
    """What came is no HTTP response, or not all of one."""


class Head(msgspec.Struct, frozen=True):
    """Status and headers; names are in lower case."""

    status: int
    headers: Mapping[str, str]

    @property
    def content_type(self) -> str:
        """What the body is."""
        return self.headers.get("content-type", "application/octet-stream")


class ResponseReader:
    """One response: `head` once it is there, the body as `feed` returns it, `is_complete` at its end."""

    __slots__ = ("_is_chunked", "_left", "_rest", "can_be_kept", "head", "is_complete")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.is_complete = False
        self.can_be_kept = True
        self._rest = b""
        self._is_chunked = False
        # Bytes of the body or of its chunk that are to come, or what has to come before there are any.
        self._left = _NEEDS_LINE

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that these contain."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self.head is None:
            data = self._read_head(data)
            if self.head is None:
                return b""
        if self._is_chunked:
            return self._read_chunks(data)
        if self._left == _UNTIL_CLOSE:
            return data
        body, extra = data[: self._left], data[self._left :]
        self._left -= len(body)
        if self._left == 0:
            self._complete(extra)
        return body

    def end(self) -> None:
        """The connection was closed by the peer: fine where that is the end of the body, else an error."""
        if self.head is not None and self._left == _UNTIL_CLOSE:
            self.is_complete = True
        elif not self.is_complete:
            raise BadResponse("the connection was closed before the answer was whole")

    def _complete(self, extra: bytes) -> None:
        self.is_complete = True
        if extra:
            self.can_be_kept = False

    def _read_head(self, data: bytes) -> bytes:
        stop = data.find(b"\r\n\r\n")
        if stop < 0:
            if len(data) > HEAD_BYTES_MAX:
                raise BadResponse(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes")
            self._rest = data
            return b""
        first, *lines = data[:stop].decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        code = status[:3]
        if not version.startswith("HTTP/1.") or len(code) != 3 or not _is_number(code):
            raise BadResponse(f"the answer begins with {first[:40]!a}, which is no HTTP/1.1")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        rest = data[stop + 4 :]
        if code[0] == "1":  # not the answer yet
            return self._read_head(rest)
        self.head = Head(int(code), headers)
        self._frame(version, headers)
        return rest

    def _frame(self, version: str, headers: Mapping[str, str]) -> None:
        connection = headers.get("connection", "").lower()
        self.can_be_kept = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        assert self.head is not None
        if self.head.status in (204, 304):
            self._left = 0
            self.is_complete = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._is_chunked = True
        elif "content-length" in headers:
            length = headers["content-length"]
            if not _is_number(length):
                raise BadResponse(f"Content-Length is {length[:40]!r}")
            self._left = int(length)
            self.is_complete = self._left == 0
        else:
            self._left = _UNTIL_CLOSE
            self.can_be_kept = False

    def _read_chunks(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        start, stop = 0, len(data)
        while start < stop and not self.is_complete:
            if self._left > 0:
                piece = data[start : start + self._left]
                pieces.append(piece)
                start += len(piece)
                self._left = self._left - len(piece) or _NEEDS_BREAK
                continue
            line_stop = data.find(b"\r\n", start)
            if line_stop < 0:
                self._rest = data[start:]
                if len(self._rest) > _LINE_BYTES_MAX:
                    raise BadResponse("a chunk of the answer has no end of line")
                break
            self._read_line(data[start:line_stop])
            start = line_stop + 2
            after = start + self._left
            if self._left > 0 and data[after : after + 2] == b"\r\n":  # all of it is here
                pieces.append(data[start:after])
                start, self._left = after + 2, _NEEDS_LINE
        if self.is_complete and start < stop:
            self.can_be_kept = False
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def _read_line(self, line: bytes) -> None:
        if self._left == _NEEDS_BREAK:
            if line:
                raise BadResponse(f"a chunk of the answer is longer than it says: {line[:20]!r}")
            self._left = _NEEDS_LINE
        elif self._left == _NEEDS_TRAILER:
            self.is_complete = not line
        else:
            size = line.partition(b";")[0].strip()
            try:
                self._left = int(size, 16)
            except ValueError:
                raise BadResponse(f"a chunk of the answer has the size {size[:20]!r}") from None
            if self._left < 0:
                raise BadResponse(f"a chunk of the answer has the size {size[:20]!r}")
            self._left = self._left or _NEEDS_TRAILER


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
