"""The watch: the topology first, then every change; readers that leave, lag or come back."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time

import msgspec
import pytest
from tests.ports import free_port
from tests.session.registry_world import LIMIT_S, SECRET, ask, member, put, registry, run, until

from baton.session.registry import (
    Change,
    ChangeKind,
    RegistryClient,
    RegistryConfig,
    RegistryServer,
    Topology,
)
from baton.session.registry import server as registry_server
from baton.session.registry.client import RegistryCall, RegistryConnection
from baton.session.registry.messages import Registered, sign


def follow(client: RegistryClient) -> tuple[list[Topology | Change], asyncio.Task[None]]:
    seen: list[Topology | Change] = []

    async def read() -> None:
        async for event in client.watch():
            seen.append(event)

    return seen, asyncio.create_task(read())


def short(event: Topology | Change) -> object:
    if isinstance(event, Topology):
        return [(roster.instance, roster.epoch, roster.ranks) for roster in event.instances]
    return event.what, event.member.rank, event.member.epoch, event.is_complete


def test_the_topology_then_each_change_in_order_with_ids() -> None:
    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as client:
            await put(server, member(rank=0))
            seen, reading = follow(client)
            await until(lambda: len(seen) == 1)
            await put(server, member(rank=1))
            await put(server, member(rank=1))  # a renewal is no news
            await put(server, member(rank=0, epoch=2, layout="tp1", ttl_s=0.05))
            await until(lambda: len(seen) == 6)
            assert list(map(short, seen)) == [
                [("p0", 1, (0,))],
                (ChangeKind.REGISTERED, 1, 1, True),
                (ChangeKind.DISPLACED, 0, 1, False),
                (ChangeKind.DISPLACED, 1, 1, False),
                (ChangeKind.REGISTERED, 0, 2, True),
                (ChangeKind.EXPIRED, 0, 2, False),
            ]
            boots, numbers = zip(*(event.id.split("-") for event in seen), strict=True)
            assert (len(set(boots)), [int(number) for number in numbers]) == (1, [1, 2, 3, 4, 5, 6])
            reading.cancel()

    run(body)


def test_expiry_is_told_though_nobody_calls() -> None:
    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as client:
            seen, reading = follow(client)
            await until(lambda: len(seen) == 1)
            await put(server, member(layout="tp1", ttl_s=0.05))
            await until(lambda: len(seen) == 3)
            assert [short(event) for event in seen[1:]] == [
                (ChangeKind.REGISTERED, 0, 1, True),
                (ChangeKind.EXPIRED, 0, 1, False),
            ]
            reading.cancel()

    run(body)


async def open_watch(server: RegistryServer, receive_bytes: int = 0) -> socket.socket:
    """A watch by hand, of which nothing has been read yet."""
    host, port = server.address.rsplit(":", 1)
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (host, int(port)))
    header = sign(SECRET, ("GET", "/v1/watch", b""), time.time(), secrets.token_hex(16))
    await loop.sock_sendall(
        raw, f"GET /v1/watch HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode()
    )
    return raw


def test_a_watch_is_never_silent_for_long() -> None:
    async def body() -> None:
        async with registry(config=RegistryConfig(beat_s=0.05)) as server:
            raw = await open_watch(server)
            got = b""
            while got.count(b": beat\n\n") < 3:
                got += await asyncio.get_running_loop().sock_recv(raw, 4096)
            assert b"Content-Type: text/event-stream" in got
            raw.close()

    run(body)


def test_a_reader_that_left_is_noticed_without_a_word_to_it() -> None:
    async def body() -> None:
        async with registry(config=RegistryConfig(beat_s=3600.0)) as server:
            raw = await open_watch(server)
            await until(lambda: len(server._watchers) == 1)
            raw.close()
            await until(lambda: len(server._watchers) == 0)

    run(body)


def test_a_slow_reader_is_dropped_and_the_others_miss_nothing() -> None:
    """The slow one reads nothing: its connection fills up, then its queue, then it is gone."""

    async def body() -> None:
        config = RegistryConfig(num_waiting_max=64)
        async with registry(config=config) as server, RegistryClient(server.url, SECRET) as client:
            seen, reading = follow(client)
            await until(lambda: len(seen) == 1)
            slow = await open_watch(server, receive_bytes=4096)
            await until(lambda: len(server._watchers) == 2)
            num_sent, long = 0, '"' * 256  # each is two bytes of JSON: the fewer events it takes
            calls = RegistryConnection(server.url, SECRET, None, lambda: None)
            while len(server._watchers) == 2:
                value = member(layout="tp1", epoch=num_sent, fingerprint=long, transport=long)
                call = RegistryCall("PUT", "/v1/members/p0/0", msgspec.json.encode(value))
                assert (await calls.call(call, Registered)).is_new
                num_sent += 1
                while len(seen) < 2 * num_sent:  # the other one keeps up
                    await asyncio.sleep(0)
            await calls.close()
            assert num_sent < 20_000
            numbers = [int(event.id.split("-")[1]) for event in seen]
            assert numbers == list(range(2 * num_sent))
            with slow:
                got = await drain(slow)
            assert got.count(b"\nid: ") < 2 * num_sent
            reading.cancel()

    run(body)


async def drain(raw: socket.socket) -> bytes:
    got, loop = b"", asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(raw, 1 << 16):
            got += data
    except ConnectionError:
        pass
    return got


def test_a_watch_comes_back_after_a_restart_and_begins_with_the_topology() -> None:
    async def body() -> None:
        first, port = RegistryServer(SECRET), free_port()
        await first.start(port=port)
        async with RegistryClient(first.url, SECRET) as client:
            seen, reading = follow(client)
            await put(first, member(layout="tp1"))
            await until(lambda: len(seen) >= 1)
            await first.close()
            async with registry(port=port) as second:
                await put(second, member("p1", layout="tp1"))
                count = len(seen)
                await until(lambda: len(seen) > count)
                assert isinstance(seen[count], Topology)
                assert seen[count].id.split("-")[0] != seen[0].id.split("-")[0]
                await put(second, member("p2", layout="tp1"))
                await until(lambda: isinstance(seen[-1], Change) and seen[-1].member.instance == "p2")
            reading.cancel()

    run(body)


def test_closing_ends_open_watches_at_once_and_a_closed_client_stops_watching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_server, "SHUTDOWN_S", 10 * LIMIT_S)

    async def body() -> None:
        server = RegistryServer(SECRET)
        await server.start(port=0)
        client = RegistryClient(server.url, SECRET)
        seen, reading = follow(client)
        raw = await open_watch(server)
        await until(lambda: len(server._watchers) == 2 and bool(seen))
        await server.close()  # long before the time is over that aiohttp gives a request to end
        assert (await drain(raw)).endswith(b"0\r\n\r\n")
        raw.close()
        await client.close()
        await reading

    run(body)


def test_there_is_a_most_to_the_number_of_watches(monkeypatch) -> None:
    monkeypatch.setattr("baton.session.registry.server.NUM_WATCHERS_MAX", 1)

    async def body() -> None:
        async with registry() as server:
            raw = await open_watch(server)
            await until(lambda: len(server._watchers) == 1)
            assert (await ask(server, "GET", "/v1/watch")).status == 429
            raw.close()

    run(body)
