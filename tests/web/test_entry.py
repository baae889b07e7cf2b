"""Who answers on a connection, and how long its client may take: plain requests, others, halves of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from baton.web import (
    Credentials,
    Edge,
    EdgeConfig,
    Lane,
    Outlet,
    Patience,
    Problem,
    Reply,
    Site,
    entry,
    writing,
)

LIMIT_S = 90.0
KEY = "sk-client"


@dataclass
class Desk:
    """Answers that a test can hold back, and what was asked."""

    seen: list[tuple[str, bytes]] = field(default_factory=list)
    statuses: list[tuple[str, int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_left: int = 0

    async def plain(self, path: str, body: bytes, outlet: Outlet) -> int:
        self.seen.append(("plain", body))
        try:
            return await self._answer(body, outlet)
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def _answer(self, body: bytes, outlet: Outlet) -> int:
        match body:
            case b"wait":
                await self.gate.wait()
            case b"full":
                raise Problem(429, "full; ask again", code="QUEUE_FULL", retry_after_s=3)
            case b"bug":
                raise RuntimeError("a bug")
            case b"late bug":
                await outlet.write(b"half", "id")
                raise RuntimeError("a bug in a stream")
            case b"flood":
                while True:
                    await outlet.write(b"x" * 65_536, "id")
            case b"stream":
                await outlet.write(b"one", "id")
                await outlet.write(b"two", "id", is_last=True)
                return 200
        await outlet.send(Reply(200, body, "text/plain"))
        return 200

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(("aiohttp", await request.read()))
        return web.Response(body=await request.read())


@asynccontextmanager
async def site(
    patience: Patience | None = None, *, has_lane: bool = True, body_s_max: float = 30.0
) -> AsyncIterator[tuple[Site, Desk]]:
    desk = Desk()
    config = EdgeConfig(1000, body_s_max, on_answer=lambda path, status: desk.statuses.append((path, status)))
    edge = Edge(Credentials([KEY]), config)
    app = edge.application()
    app.add_routes([web.post("/ask", desk.post), web.get("/other", desk.post)])
    lane = Lane(edge, {"/ask": desk.plain}) if has_lane else None
    found = Site(app, lane=lane, patience=patience)
    await found.start("127.0.0.1", 0)
    try:
        yield found, desk
    finally:
        await found.close()


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
async def called(found: Site) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


def test_plain_and_other_requests_take_turns_on_one_connection():
    async def play() -> None:
        async with site() as (found, desk), called(found) as caller:
            for data, by in (
                (ask(b"a"), "plain"),
                (ask(b"", method="GET /other"), "aiohttp"),
                (ask(b"b"), "plain"),
                (ask(b"stream"), "plain"),
                (ask(b"c", "Connection: keep-alive", "Expect: 100-continue"), "aiohttp"),
            ):
                caller.writer.write(data)
                if b"Expect" in data:
                    assert b"100" in await caller.reader.readuntil(b"\r\n\r\n")
                status, body, head = await caller.answer()
                expected = b"onetwo" if b"stream" in data else desk.seen[-1][1]
                assert (status, body, desk.seen[-1][0]) == (200, expected, by)
                assert "Date: " in head
                assert "Server: " in head
            # What came after such a request cannot be told from its rest: it stays where it is.
            caller.writer.write(ask(b"d"))
            assert (await caller.answer())[:2] == (200, b"d")
            assert desk.seen[-1] == ("aiohttp", b"d")
            assert desk.statuses == [("/ask", 200), ("/other", 200)] + [("/ask", 200)] * 4

    run(play)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_pieces_of_any_size_are_one_request(size: int):
    async def play() -> None:
        async with site() as (found, desk), called(found) as caller:
            data = ask(b"first") + ask(b"second") + ask(b"", method="GET /other") + ask(b"third")
            for start in range(0, len(data), size):
                caller.writer.write(data[start : start + size])
                await caller.writer.drain()
                await asyncio.sleep(0)
            assert [(await caller.answer())[1] for _ in range(4)] == [b"first", b"second", b"", b"third"]
            assert [body for _, body in desk.seen] == [b"first", b"second", b"", b"third"]

    run(play)


def test_requests_sent_ahead_are_answered_in_order_and_not_read_without_end():
    async def play() -> None:
        async with site() as (found, desk), called(found) as caller:
            caller.writer.write(ask(b"wait") + ask(b"next"))
            await until(lambda: desk.seen)
            many = ask(b"x" * 900) * 5_000
            caller.writer.write(many)
            for _ in range(20):
                await asyncio.sleep(0.01)
            (one,) = found._house.entries
            assert len(one._rest) < 4 * entry.LATER_BYTES_MAX + 256 * 1024
            assert len(desk.seen) == 1
            desk.gate.set()
            assert [(await caller.answer())[1] for _ in range(2)] == [b"wait", b"next"]
            assert {(await caller.answer())[0] for _ in range(1000)} == {200}

    run(play)


def test_refusals_have_the_same_form_whoever_answers():
    async def play() -> None:
        async with site() as (found, desk):
            for data, status, code in (
                (ask(b"full"), 429, "QUEUE_FULL"),
                (ask(b"bug"), 500, None),
                (ask(b"x", key="wrong"), 401, "invalid_api_key"),
                (ask(b"x" * 1001), 413, "too_large"),
                (ask(b"x", method="POST /nowhere"), 404, "unknown_url"),
                (ask(b"x", "Content-Encoding: gzip"), 415, None),
            ):
                async with called(found) as caller:
                    caller.writer.write(data)
                    found_status, body, head = await caller.answer()
                    error = json.loads(body)["error"]
                    assert (found_status, error["code"]) == (status, code), error
                    assert set(error) == {"message", "type", "param", "code"}
                    assert ("Retry-After: 3" in head) == (status == 429)
            assert sorted(status for _, status in desk.statuses) == [401, 404, 413, 415, 429, 500]

    run(play)


def test_stream_that_breaks_off_is_no_whole_answer():
    async def play() -> None:
        async with site() as (found, desk), called(found) as caller:
            caller.writer.write(ask(b"late bug"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
                await caller.answer()
            assert desk.statuses == [("/ask", 500)]

    run(play)


def test_client_that_leaves_ends_its_request():
    async def play() -> None:
        async with site() as (found, desk):
            async with called(found) as caller:
                caller.writer.write(ask(b"wait"))
                await until(lambda: desk.seen)
            await until(lambda: desk.num_left == 1)
            assert desk.statuses == [("/ask", 499)]
            await until(lambda: not found._house.entries)

    run(play)


def test_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "WRITE_S_MAX", 0.3)

    async def play() -> None:
        async with site() as (found, desk), called(found) as caller:
            caller.writer.write(ask(b"flood"))
            await until(lambda: desk.statuses)
            assert desk.statuses == [("/ask", 499)]
            await until(lambda: not found._house.entries)

    run(play)


HALVES = {
    "a plain one": b"POST /ask HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "another": b"GET /other HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "a word": b"POST /as",
}


@pytest.mark.parametrize("has_lane", [True, False])
@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("is_first", [True, False])
def test_half_a_head_has_a_time_limit_of_its_own(half: bytes, has_lane: bool, is_first: bool):
    async def play() -> None:
        patience = Patience(head_s_max=0.3, idle_s_max=LIMIT_S * 2)
        async with site(patience, has_lane=has_lane) as (found, _), called(found) as caller:
            if not is_first:
                caller.writer.write(ask(b"", method="GET /other"))
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
            await until(lambda: not found._house.entries)

    run(play)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:  # it went on sending, so the last words may be lost
        return b""


def test_the_limit_is_told_and_is_for_heads_alone():
    async def play() -> None:
        async with (
            site(Patience(head_s_max=0.3)) as (found, desk),
            called(found) as slow,
            called(found) as quiet,
            called(found) as asking,
        ):
            slow.writer.write(HALVES["a plain one"])
            asking.writer.write(ask(b"wait"))
            status, body, head = await slow.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")
            assert "Connection: close" in head
            assert await slow.reader.read() == b""
            desk.gate.set()
            assert (await asking.answer())[1] == b"wait"
            quiet.writer.write(ask(b"after a while"))
            assert (await quiet.answer())[1] == b"after a while"

    run(play)


def test_without_a_limit_half_a_head_stays():
    async def play() -> None:
        async with site(Patience(head_s_max=1e9, idle_s_max=0.4)) as (found, _), called(found) as caller:
            caller.writer.write(HALVES["a plain one"])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await caller.reader.read()

    run(play)


def test_half_a_body_has_the_time_of_a_body():
    async def play() -> None:
        async with site(Patience(head_s_max=0.3), body_s_max=0.3) as (found, _), called(found) as caller:
            caller.writer.write(ask(b"all of it")[:-3])
            status, body, _ = await caller.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")

    run(play)


@pytest.mark.parametrize("has_lane", [True, False])
def test_idle_connections_are_closed_and_used_ones_are_not(has_lane: bool):
    async def play() -> None:
        async with (
            site(Patience(idle_s_max=1.0), has_lane=has_lane) as (found, _),
            called(found) as idle,
            called(found) as used,
        ):
            reading = asyncio.create_task(idle.reader.read())
            while not reading.done():
                used.writer.write(ask(b"again"))
                assert (await used.answer())[1] == b"again"
                await asyncio.sleep(0.02)
            assert await reading == b""

    run(play)


def test_closing_waits_for_what_is_nearly_answered_and_not_for_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.web.site._SHUTDOWN_S", 5.0)

    async def play() -> None:
        async with site() as (found, desk), called(found) as caller, called(found) as idle:
            caller.writer.write(ask(b"wait"))
            await until(lambda: desk.seen)
            closing = asyncio.create_task(found.close())
            assert await idle.reader.read() == b""
            desk.gate.set()
            assert (await caller.answer())[1] == b"wait"
            assert await caller.reader.read() == b""
            await closing
        monkeypatch.setattr("baton.web.site._SHUTDOWN_S", 0.2)
        async with site() as (found, desk), called(found) as caller:
            caller.writer.write(ask(b"wait"))
            await until(lambda: desk.seen)
            await found.close()
            assert desk.num_left == 1
            assert await _rest(caller.reader) == b""

    run(play)
