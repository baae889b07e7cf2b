"""Plain requests are read as aiohttp's own parser reads them, or not at all; answers are whole HTTP."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.web import plain
from baton.web.plain import HEAD_BYTES_MAX, Reply, is_likely, read_head, stream_head, whole

PATHS = frozenset({b"/v1/completions", b"/v1/chat/completions"})
GOOD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
NAMES = ["Content-Length", "content-length", "Transfer-Encoding", "Authorization", "Connection", "Expect"]
NAMES += ["Content-Encoding", "X-Thing", "Host", "Upgrade", "Con tent", "", "\x00", "Na\u00efve"]
VALUES = ["4", "0", "+4", "4, 4", "-1", "chunked", "Bearer k", "keep-alive", "close", "100-continue", "x\ty"]
VALUES += ["", " 4 ", "\x00", "a\rb", "a\nb", "h\u00e9", "gzip", "1" * 12, "x" * 9000]


def by_aiohttp(data: bytes) -> tuple[str, dict[str, str], bool] | None:
    """Path, headers and whether the connection is kept, as aiohttp has them; None where it refuses."""

    async def read() -> Any:
        loop = asyncio.get_running_loop()
        parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16, auto_decompress=False)
        try:
            messages, is_upgraded, _ = parser.feed_data(data)
        except HttpProcessingError:
            return None
        (message, payload), *more = messages
        assert not more
        assert not is_upgraded
        is_kept = not message.should_close and not message.chunked and message.method == "POST"
        assert not payload.is_eof() or message.headers.get("Content-Length") == "0"
        return message.path, dict(message.headers), is_kept

    return asyncio.run(read())


def compared(data: bytes) -> bool:
    """Whether it is plain, and then is what aiohttp says that it is."""
    found = read_head(data)
    if found is None:
        return False
    theirs = by_aiohttp(data[: found.num_bytes])
    assert theirs is not None, "aiohttp refuses it"
    path, headers, is_kept = theirs
    lower = {name.lower(): value for name, value in headers.items()}
    assert is_kept
    assert (found.path, str(found.num_body_bytes)) == (path, str(int(lower["content-length"])))
    assert found.authorization == lower.get("authorization", "")
    assert not {"transfer-encoding", "expect", "upgrade", "content-encoding"} & set(lower)
    return True


LINES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=5)
COLONS = st.sampled_from([": ", ":", " : ", ":\t"])
ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n "])


@settings(max_examples=400, deadline=None)
@given(LINES, ENDS, COLONS, st.sampled_from(["1.1", "1.1", "1.0", "2"]), st.booleans())
@example([("Host", "x"), ("Content-Length", "4"), ("Authorization", "Bearer k")], "\r\n", ": ", "1.1", False)
@example([("content-length", "4")], "\r\n", ": ", "1.1", True)
def test_what_is_plain_is_read_as_aiohttp_reads_it(
    lines: list[tuple[str, str]], end: str, colon: str, version: str, is_good: bool
):
    lines = [("Host", "x"), ("Content-Length", "4"), *lines] if is_good else lines
    head = f"POST /v1/completions HTTP/{version}{end}"
    head += "".join(f"{name}{colon}{value}{end}" for name, value in lines) + "\r\n"
    compared(head.encode("utf-8", "surrogateescape") + b"\r\n\r\n")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_a_few_strange_bytes_never_make_a_difference(at: int, put: bytes, cut: int):
    compared(GOOD[:at] + put + GOOD[at + cut :] + b"\r\n\r\n")


def test_what_clients_send_is_plain():
    usual = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\n"
        b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        b"User-Agent: OpenAI/Python 1.0\r\nAuthorization: Bearer sk-1\r\nContent-Length: 12\r\n\r\n"
    )
    assert compared(usual)
    assert compared(GOOD)


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length: 4",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Content-Encoding: gzip",
        b"Upgrade: h2c",
        b" folded",
        b"host: y",
        b"A: " + b"x" * HEAD_BYTES_MAX,
        b"\r\n".join(b"h%d: x" % number for number in range(200)),
    ],
)
def test_whatever_is_unusual_is_left_to_aiohttp(line: bytes):
    assert read_head(GOOD[:-2] + line + b"\r\n\r\n") is None


def test_a_reader_that_takes_the_unusual_for_plain_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain, "_UNUSUAL", frozenset())
    with pytest.raises(AssertionError):
        compared(GOOD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
    monkeypatch.setattr(plain, "_FORM", re.compile(rb"POST (\S+) HTTP/1\.\d\r\n(?:.*\r\n)*?\r\n"))
    with pytest.raises(AssertionError):
        compared(GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"))


def test_a_beginning_is_waited_for_only_while_it_can_become_plain():
    for stop in range(1, len(GOOD)):
        assert is_likely(GOOD[:stop], PATHS)
    for other in (
        b"G",
        b"POST /v2",
        b"POST /v1/completions/x ",
        b"POST /v1/completionsx",
        b"\r\n",
        b"post ",
    ):
        assert not is_likely(other, PATHS)


def test_no_header_can_have_a_line_of_its_own():
    assert b"\r\nX-A: b\r\n" in stream_head("text/plain", (("X-A", "b"),))
    for value in ("a\r\nX-Evil: 1", "a\nb", "h\u00e9"):
        with pytest.raises(ValueError, match="characters"):
            whole(Reply(200, b"{}", value))
