"""How long a client may take for headers, body and the next request; and what ends a connection."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from baton.serving import http
from baton.serving.http import ApiError, Credentials, EventStream, HttpLimits, HttpServer

LIMIT_S = 300.0
KEY = "sk-client"


@dataclass
class Answers:
    """Answers that a test can hold back, and what was asked."""

    seen: list[bytes] = field(default_factory=list)
    statuses: list[tuple[str, int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    write_s_max: float = 30.0
    num_left: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(body)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        stream = EventStream(request, "id", self.write_s_max)
        match body:
            case b"wait":
                await self.gate.wait()
            case b"full":
                raise ApiError(429, "full; ask again", code="QUEUE_FULL", retry_after_s=3)
            case b"bug":
                raise RuntimeError("a bug")
            case b"late bug":
                await stream.write(b"half")
                raise RuntimeError("a bug in a stream")
            case b"flood":
                while True:
                    await stream.write(b"x" * 65_536)
            case b"stream":
                await stream.write(b"one")
                return await stream.end(b"two")
        return web.Response(body=body)


@asynccontextmanager
async def site(**limits: Any) -> AsyncIterator[tuple[HttpServer, Answers]]:
    answers = Answers()
    server = HttpServer(
        Credentials([KEY]),
        HttpLimits(**{"body_bytes_max": 1000, **limits}),
        on_response=lambda request, status: answers.statuses.append((request.path, status)),
    )
    server.app.add_routes([web.post("/ask", answers.handle), web.get("/other", answers.handle)])
    await server.start("127.0.0.1", 0)
    try:
        yield server, answers
    finally:
        await server.close()


def run(play: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await play()

    asyncio.run(limited())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def ask(body: bytes, *lines: str, method: str = "POST /ask", key: str = KEY) -> bytes:
    head = [f"{method} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines]
    head += [] if method.startswith("GET") else [f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


class Caller:
    """A connection that reads answers one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, bytes, str]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split()[1])
        if "chunked" in head:
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        else:
            length = head.lower().split("content-length: ")[1].split("\r\n")[0]
            body = await self.reader.readexactly(int(length))
        return status, body, head


@asynccontextmanager
async def called(found: HttpServer) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("size", [1, 7, 60])
def test_pieces_of_any_size_are_one_request(size: int):
    async def play() -> None:
        async with site() as (found, answers), called(found) as caller:
            data = ask(b"first") + ask(b"second") + ask(b"", method="GET /other") + ask(b"stream")
            for start in range(0, len(data), size):
                caller.writer.write(data[start : start + size])
                await caller.writer.drain()
                await asyncio.sleep(0)
            bodies = [b"first", b"second", b"", b"onetwo"]
            assert [(await caller.answer())[1] for _ in range(4)] == bodies
            assert answers.seen == [b"first", b"second", b"", b"stream"]
            assert answers.statuses == [("/ask", 200), ("/ask", 200), ("/other", 200), ("/ask", 200)]

    run(play)


def test_requests_sent_ahead_are_answered_in_order_and_not_read_without_end():
    async def play() -> None:
        async with site() as (found, answers), called(found) as caller:
            caller.writer.write(ask(b"wait") + ask(b"next"))
            await until(lambda: answers.seen)
            caller.writer.write(ask(b"x" * 900) * 20_000)
            with pytest.raises(TimeoutError):  # the server has stopped reading
                async with asyncio.timeout(2.0):
                    await caller.writer.drain()
            assert len(answers.seen) == 1
            answers.gate.set()
            assert [(await caller.answer())[1] for _ in range(2)] == [b"wait", b"next"]
            assert {(await caller.answer())[0] for _ in range(1000)} == {200}

    run(play)


def test_refusals_have_one_form():
    async def play() -> None:
        async with site() as (found, answers):
            for data, status, code in (
                (ask(b"full"), 429, "QUEUE_FULL"),
                (ask(b"bug"), 500, None),
                (ask(b"x", key="wrong"), 401, "invalid_api_key"),
                (ask(b"x" * 1001), 413, "too_large"),
                (ask(b"x", method="POST /nowhere"), 404, "unknown_url"),
                (ask(b"x", "Content-Encoding: gzip"), 415, "compressed"),
            ):
                async with called(found) as caller:
                    caller.writer.write(data)
                    found_status, body, head = await caller.answer()
                    error = json.loads(body)["error"]
                    assert (found_status, error["code"]) == (status, code), error
                    assert set(error) == {"message", "type", "param", "code"}
                    assert ("Retry-After: 3" in head) == (status == 429)
            assert sorted(status for _, status in answers.statuses) == [401, 404, 413, 415, 429, 500]

    run(play)


def test_stream_that_breaks_off_is_no_whole_answer():
    async def play() -> None:
        async with site() as (found, answers), called(found) as caller:
            caller.writer.write(ask(b"late bug"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
                await caller.answer()
            assert answers.statuses == [("/ask", 500)]

    run(play)


def test_client_that_leaves_ends_its_request():
    async def play() -> None:
        async with site() as (found, answers):
            async with called(found) as caller:
                caller.writer.write(ask(b"wait"))
                await until(lambda: answers.seen)
            await until(lambda: answers.num_left == 1)
            assert answers.statuses == [("/ask", 499)]
            await until(lambda: not found._heads)

    run(play)


def test_client_that_does_not_read_is_dropped():
    async def play() -> None:
        async with site() as (found, answers), called(found) as caller:
            answers.write_s_max = 0.3
            caller.writer.write(ask(b"flood"))
            await until(lambda: answers.statuses)
            assert answers.statuses == [("/ask", 499)]
            await until(lambda: not found._heads)

    run(play)


HALVES = {
    "a post": b"POST /ask HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "a get": b"GET /other HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "a word": b"POST /as",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("before", [b"", b"GET", b"POST"])
def test_half_a_head_has_a_time_limit_of_its_own(half: bytes, before: bytes):
    async def play() -> None:
        async with site(head_s_max=0.3, idle_s_max=LIMIT_S * 2) as (found, _), called(found) as caller:
            if before:
                caller.writer.write(ask(b"", method="GET /other") if before == b"GET" else ask(b"a"))
                assert (await caller.answer())[0] == 200

            async def trickle() -> None:
                caller.writer.write(half)
                while True:  # a byte now and then does not make it a request
                    await asyncio.sleep(0.1)
                    caller.writer.write(b"x")

            trickling = asyncio.create_task(trickle())
            answer = await _rest(caller.reader)
            trickling.cancel()
            assert b" 408 " in answer.partition(b"\r\n")[0] or answer == b""

    run(play)


def test_half_a_head_behind_a_request_has_the_limit_too():
    async def play() -> None:
        async with site(head_s_max=0.3, idle_s_max=LIMIT_S * 2) as (found, answers), called(found) as caller:
            caller.writer.write(ask(b"wait"))
            await until(lambda: answers.seen)
            caller.writer.write(HALVES["a get"])
            await caller.writer.drain()
            await asyncio.sleep(0.05)
            answers.gate.set()
            assert (await caller.answer())[1] == b"wait"
            assert b" 408 " in (await _rest(caller.reader)).partition(b"\r\n")[0]

    run(play)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:  # it went on sending, so the last bytes may be lost
        return b""


def test_the_limit_is_reported_and_is_for_heads_alone():
    async def play() -> None:
        async with (
            site(head_s_max=0.3) as (found, answers),
            called(found) as slow,
            called(found) as quiet,
            called(found) as asking,
        ):
            slow.writer.write(HALVES["a post"])
            asking.writer.write(ask(b"wait"))
            status, body, head = await slow.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")
            assert "Connection: close" in head
            assert await slow.reader.read() == b""
            answers.gate.set()
            assert (await asking.answer())[1] == b"wait"
            quiet.writer.write(ask(b"after a while"))
            assert (await quiet.answer())[1] == b"after a while"

    run(play)


def test_half_a_body_has_the_time_of_a_body():
    async def play() -> None:
        async with site(head_s_max=0.3, body_s_max=0.3) as (found, _), called(found) as caller:
            caller.writer.write(ask(b"all of it")[:-3])
            status, body, _ = await caller.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")

    run(play)


@pytest.mark.parametrize("is_used_once", [True, False])
def test_idle_connections_are_closed_and_used_ones_are_not(is_used_once: bool):
    async def play() -> None:
        longest_s, idle_s_max = math.inf, 1.0
        while longest_s > idle_s_max / 2:  # a machine that stood still makes every connection idle
            async with (
                site(idle_s_max=idle_s_max) as (found, _),
                called(found) as idle,
                called(found) as used,
            ):
                if is_used_once:
                    idle.writer.write(ask(b"once"))
                    assert (await idle.answer())[1] == b"once"
                reading = asyncio.create_task(idle.reader.read())
                longest_s, used_s = 0.0, monotonic()
                try:
                    while not reading.done():
                        used.writer.write(ask(b"again"))
                        assert (await used.answer())[1] == b"again"
                        await asyncio.sleep(0.02)
                        longest_s, used_s = max(longest_s, monotonic() - used_s), monotonic()
                except (asyncio.IncompleteReadError, ConnectionError):
                    longest_s = max(longest_s, monotonic() - used_s)
                    assert longest_s > idle_s_max / 2, "one that is used was closed"
                assert await reading == b""

    run(play)


def test_closing_waits_for_what_is_nearly_answered_and_not_for_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "_SHUTDOWN_S", 30.0)

    async def play() -> None:
        async with site() as (found, answers), called(found) as caller, called(found) as idle:
            caller.writer.write(ask(b"wait"))
            await until(lambda: answers.seen)
            closing = asyncio.create_task(found.close())
            assert await idle.reader.read() == b""
            answers.gate.set()
            assert (await caller.answer())[1] == b"wait"
            assert await caller.reader.read() == b""
            await closing
        monkeypatch.setattr(http, "_SHUTDOWN_S", 0.2)
        async with site() as (found, answers), called(found) as caller:
            caller.writer.write(ask(b"wait"))
            await until(lambda: answers.seen)
            await found.close()
            assert answers.num_left == 1
            assert await _rest(caller.reader) == b""

    run(play)
