"""Responses are the same however their bytes are cut; what is no response is an error."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.world import run

from baton.errors import ConfigError
from baton.router.wire.leg import BUFFER_BYTES_MAX, Lost
from baton.router.wire.pool import Call, Origin, Pool, read_origin
from baton.router.wire.reading import BadResponse, ResponseReader

BODY = b"first piece\r\nsecond: \r\n\r\nthird"


def chunked(pieces: list[bytes]) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nA: trailer\r\n\r\n"


def read_in(raw: bytes, cuts: list[int]) -> tuple[ResponseReader, bytes]:
    reader, body = ResponseReader(), b""
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    for start, stop in pairwise(places):
        body += reader.feed(raw[start:stop])
    return reader, body


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_chunked_body_is_the_same_however_it_is_cut(pieces: list[bytes], cuts: list[int]):
    reader, body = read_in(chunked(pieces), cuts)
    assert body == b"".join(pieces)
    assert reader.is_complete
    assert reader.can_be_kept


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=12))
def test_counted_body_is_the_same_however_it_is_cut(cuts: list[int]):
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Much\r\nRETRY-AFTER:  3 \r\nContent-Length: %d\r\n\r\n"
    reader, body = read_in(raw % len(BODY) + BODY, cuts)
    assert reader.head is not None
    assert (reader.head.status, reader.head.headers["retry-after"], body) == (429, "3", BODY)
    assert reader.is_complete


def test_body_until_the_end_of_the_connection():
    reader, body = read_in(b"HTTP/1.0 200 OK\r\n\r\n" + BODY, [])
    assert (body, reader.is_complete, reader.can_be_kept) == (BODY, False, False)
    reader.end()
    assert reader.is_complete


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"x" * 70_000,
    ],
)
def test_what_is_no_response_is_an_error(raw: bytes):
    with pytest.raises(BadResponse):
        ResponseReader().feed(raw)


def test_half_a_response_is_an_error():
    for raw in (
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        chunked([b"x"])[:-3],
    ):
        reader = ResponseReader()
        reader.feed(raw)
        with pytest.raises(BadResponse):
            reader.end()


@pytest.mark.parametrize(
    "url", ["https://a:1", "http://a:1/path", "ftp://a", "a:1", "http://[::1", "http://:80"]
)
def test_urls_that_cannot_be_used(url: str):
    with pytest.raises(ConfigError, match="http://host:port"):
        read_origin(url)


def test_urls_that_can():
    assert read_origin("http://10.0.0.1:8000/") == Origin("10.0.0.1", 8000)
    assert read_origin("http://[::1]:80").name == "[::1]:80"


class Listener:
    """A server of bytes: each request is answered with the next of these, and perhaps hung up on."""

    def __init__(self, answers: list[bytes], *, is_cut: bool = False) -> None:
        self.answers, self.is_cut = answers, is_cut
        self.num_connections = 0

    async def __aenter__(self) -> Origin:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return Origin("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while self.answers and await reader.readuntil(b"\r\n\r\n"):
            writer.write(self.answers.pop(0))
            if self.is_cut:
                break
        await writer.drain()
        writer.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_connections_are_used_again_and_only_when_they_are_clean():
    async def body() -> None:
        listener = Listener([OK, OK, OK + b"more", OK])
        async with listener as origin:
            pool = Pool("key", 1.0)
            for _ in range(3):
                assert await pool.fetch(origin, Call("/x"), 5.0) == (200, b"ok")
            assert listener.num_connections == 1
            assert await pool.fetch(origin, Call("/x"), 5.0) == (200, b"ok")
            assert listener.num_connections == 2
            pool.close()

    run(body)


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"nonsense\r\n\r\n", chunked([b"abc"])[:-5]])
def test_broken_answers_are_lost_legs(answer: bytes):
    async def body() -> None:
        async with Listener([answer], is_cut=True) as origin:
            with pytest.raises(Lost):
                await Pool(None, 1.0).fetch(origin, Call("/x"), 5.0)

    run(body)


def test_nobody_listening_is_told_apart():
    async def body() -> None:
        async with Listener([]) as origin:
            pass
        with pytest.raises(Lost) as found:
            await Pool(None, 1.0).fetch(origin, Call("/x"), 5.0)
        assert found.value.code == "REFUSED"

    run(body)


def test_what_is_not_read_is_not_taken_in():
    async def body() -> None:
        size = 64 << 20
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
        async with Listener([head + bytes(size)]) as origin:
            leg = await Pool(None, 1.0).send(origin, Call("/x"))
            await leg.answered()
            await asyncio.sleep(0.3)
            assert not leg.is_waiting  # paused: silence is this side's doing
            num_bytes = len(leg.kept())
            assert BUFFER_BYTES_MAX < num_bytes < 4 * BUFFER_BYTES_MAX
            assert len(await leg.whole()) == size

    run(body)


def test_leg_that_is_ended_wakes_its_reader_with_the_cause():
    async def body() -> None:
        async with Listener([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"]) as origin:
            leg = await Pool(None, 1.0).send(origin, Call("/x"))
            settled: list[object] = []
            leg.on_settled = settled.append
            await leg.answered()
            reading = asyncio.create_task(leg.whole())
            await asyncio.sleep(0)
            leg.fail(Lost("because", "DEADLINE"))
            with pytest.raises(Lost, match="because"):
                await reading
            leg.close()
            assert settled == [leg]

    run(body)
