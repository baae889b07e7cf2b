"""The router's client: connections are reused, broken responses are errors, requests can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.connector import Connection
from tests.ports import free_port
from tests.serving.router_world import run, until

from baton.errors import ConfigError
from baton.serving import fleet
from baton.serving.fleet import (
    FleetInstance,
    PostTarget,
    UpstreamClient,
    UpstreamError,
    fetch,
    instance_base,
)
from baton.serving.router import RouterLimits, UpstreamRequest
from baton.session.registry import Role, Roster

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize("url", ["http://a:1/path", "ftp://a", "a:1", "http://[::1", "http://:80"])
def test_urls_that_cannot_be_used(url: str):
    with pytest.raises(ConfigError, match="http://host:port"):
        instance_base(url)


def test_urls_that_can():
    assert instance_base("http://10.0.0.1:8000/") == "http://10.0.0.1:8000"
    assert instance_base("https://[::1]:80") == "https://[::1]:80"


class Listener:
    """A server of bytes: each request is answered with the next of these, and perhaps hung up on."""

    def __init__(self, answers: list[bytes], *, is_cut: bool = False) -> None:
        self.answers, self.is_cut = answers, is_cut
        self.num_connections = 0
        self.num_sent = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while self.answers and await reader.readuntil(b"\r\n\r\n"):
            answer = self.answers.pop(0)
            for start in range(0, len(answer), 1 << 20):
                writer.write(answer[start : start + (1 << 20)])
                await writer.drain()
                self.num_sent += 1
            if self.is_cut:
                break
        await writer.drain()
        writer.close()


@asynccontextmanager
async def client() -> AsyncIterator[UpstreamClient]:
    found = UpstreamClient("key", 30.0)
    try:
        yield found
    finally:
        await found.close()


def test_connections_are_used_again():
    async def body() -> None:
        listener = Listener([OK, CHUNKED, OK])
        async with listener as url, client() as upstream:
            answers = [await fetch(upstream.session, f"{url}/x", 60.0) for _ in range(3)]
            assert answers == [(200, b"ok"), (200, b"abc"), (200, b"ok")]
            assert listener.num_connections == 1

    run(body)


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"nonsense\r\n\r\n", CHUNKED[:-5], CHUNKED[:-9]])
def test_broken_answers_are_errors(answer: bytes):
    async def body() -> None:
        async with Listener([answer], is_cut=True) as url, client() as upstream:
            with pytest.raises(UpstreamError) as raised:
                await fetch(upstream.session, f"{url}/x", 60.0)
            assert raised.value.code == "PEER_LOST"

    run(body)


def instance(url: str) -> FleetInstance:
    return FleetInstance(
        Roster(
            instance="i",
            role=Role.BOTH,
            epoch=1,
            layout="",
            coordinator="",
            fingerprint="",
            transport="",
            url=url,
            ranks=(),
            is_complete=True,
        )
    )


async def posted(upstream: UpstreamClient, url: str) -> tuple[int, bytes]:
    request = UpstreamRequest(upstream, instance(url), RouterLimits())
    try:
        response = await request.send("/x", b"{}")
        return response.code, await request.read_all()
    finally:
        request.close()


@pytest.mark.parametrize(
    ("answers", "num_connections"),
    [
        ([OK, CHUNKED, OK], 1),
        ([OK, LAST, OK], 2),
        ([OK + OK, OK], 2),  # the second response answers nothing
        ([INTERIM + OK, INTERIM + INTERIM + CHUNKED], 1),
    ],
)
def test_posts_use_connections_again_where_they_can(answers: list[bytes], num_connections: int):
    async def body() -> None:
        listener, bodies = Listener(list(answers)), [b"abc" if CHUNKED in sent else b"ok" for sent in answers]
        async with listener as url, client() as upstream:
            assert [await posted(upstream, url) for _ in answers] == [(200, sent) for sent in bodies]
            assert listener.num_connections == num_connections

    run(body)


def test_a_connection_that_the_instance_has_closed_is_not_used():
    async def body() -> None:
        listener = Listener([OK, OK], is_cut=True)
        async with listener as url, client() as upstream:
            assert await posted(upstream, url) == (200, b"ok")
            (idle,) = upstream.target(url, "/x").idle
            await until(lambda: idle[0].closed)
            assert await posted(upstream, url) == (200, b"ok")
            assert listener.num_connections == 2

    run(body)


def test_a_connection_with_a_response_to_nothing_is_not_used():
    async def body() -> None:
        listener = Listener([OK, OK])
        async with listener as url, client() as upstream:
            await posted(upstream, url)
            ((connection, _),) = upstream.target(url, "/x").idle
            assert connection.protocol is not None
            connection.protocol.data_received(CHUNKED)
            assert await posted(upstream, url) == (200, b"ok")
            assert listener.num_connections == 2

    run(body)


def test_idle_connections_are_not_kept_for_long(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        listener = Listener([OK, OK, OK])
        async with listener as url, client() as upstream:
            await posted(upstream, url)
            monkeypatch.setattr(fleet, "IDLE_S_MAX", -1.0)
            await posted(upstream, url)
            assert listener.num_connections == 2

    run(body)


def test_idle_connections_are_closed_where_no_request_follows(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        monkeypatch.setattr(fleet, "IDLE_S_MAX", 2.0)
        listener = Listener([OK] * 4)
        async with listener as url, client() as upstream:
            await asyncio.gather(*(posted(upstream, url) for _ in range(3)))
            target = upstream.target(url, "/x")
            idle = [connection for connection, _ in target.idle]
            assert len(idle) == 3
            await until(lambda: not target.idle)
            assert all(connection.closed for connection in idle)
            assert await posted(upstream, url) == (200, b"ok")
            assert listener.num_connections == 4

    run(body)


def test_a_connection_with_an_unsent_request_is_not_used_again():
    async def body() -> None:
        over = asyncio.Event()

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await over.wait()
            writer.transport.abort()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client() as upstream:
            request = UpstreamRequest(upstream, instance(url), RouterLimits())
            await request.send("/x", bytes(64 << 20))
            assert await request.read_all() == b"ok"
            assert upstream.target(url, "/x").take() is None
            request.close()
        over.set()
        server.close()
        await asyncio.sleep(0.05)

    run(body)


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"nonsense\r\n\r\n", CHUNKED[:-5], CHUNKED[:-9]])
def test_broken_answers_to_posts_are_errors(answer: bytes):
    async def body() -> None:
        async with Listener([answer], is_cut=True) as url, client() as upstream:
            with pytest.raises(UpstreamError) as raised:
                await posted(upstream, url)
            assert raised.value.code == "PEER_LOST"
            assert "\n" not in raised.value.text

    run(body)


def test_a_closed_port_is_told_apart():
    async def body() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with client() as upstream:
            for asked in (fetch(upstream.session, f"{url}/x", 60.0), posted(upstream, url)):
                with pytest.raises(UpstreamError) as raised:
                    await asked
                assert raised.value.code == "REFUSED"

    run(body)


def test_silence_is_a_deadline():
    async def body() -> None:
        async with Listener([b"HTTP/1.1 200 OK\r\n", b""]) as url, client() as upstream:
            with pytest.raises(UpstreamError) as raised:
                await fetch(upstream.session, f"{url}/x", 0.2)
            assert raised.value.code == "DEADLINE"

    run(body)


def test_a_response_that_is_not_read_is_not_taken_in():
    async def body() -> None:
        size = 64 << 20
        listener = Listener([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)])
        async with listener as url, client() as upstream:
            request = UpstreamRequest(upstream, instance(url), RouterLimits())
            await request.send("/x", b"{}")
            num_sent = -1
            while num_sent != listener.num_sent:  # until nothing moves any more
                num_sent = listener.num_sent
                await asyncio.sleep(0.3)
            assert num_sent < 48
            assert not request.is_waiting  # the silence is this side's doing
            assert len(await request.read_all()) == size

    run(body)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"])
def test_a_request_that_is_ended_wakes_its_reader_with_the_cause(head: bytes):
    async def body() -> None:
        async with Listener([head, b""]) as url, client() as upstream:
            request = UpstreamRequest(upstream, instance(url), RouterLimits())

            async def read() -> bytes:
                await request.send("/x", b"{}")
                return await request.read_all()

            reading = asyncio.create_task(read())
            await until(lambda: request.is_waiting and bool(request.response) == bool(head))
            request.fail(UpstreamError("because", "DEADLINE"))
            with pytest.raises(UpstreamError, match="because"):
                await reading
            with pytest.raises(UpstreamError, match="because"):
                await request.read()
            request.close()

    run(body)


def test_a_request_that_is_ended_as_its_connection_opens_fails_at_once(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        async with Listener([b"", b""]) as url, client() as upstream:
            request, connect = UpstreamRequest(upstream, instance(url), RouterLimits()), upstream.connect

            async def connect_late(target: PostTarget) -> Connection:
                connection = await connect(target)
                request.fail(UpstreamError("because", "DEADLINE"))
                return connection

            monkeypatch.setattr(upstream, "connect", connect_late)
            with pytest.raises(UpstreamError, match="because"):
                await request.send("/x", b"{}")
            request.close()

    run(body)
