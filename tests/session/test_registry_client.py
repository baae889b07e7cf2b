"""The client against real registries: what it keeps, heals, hears and gives up."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack

import pytest
from tests.ports import free_port
from tests.session.registry_world import (
    LIMIT_S,
    SECRET,
    RegistryProcess,
    ask,
    member,
    put,
    registry,
    run,
    until,
)

from baton.errors import ConfigError
from baton.session.registry import (
    Refusal,
    Registration,
    RegistryClient,
    RegistryError,
    RegistryServer,
    Topology,
)
from baton.session.registry import client as registry_client


async def complete(client: RegistryClient) -> Topology:
    """Waits until the registry is there and everything in it is complete."""
    while True:
        try:
            found = await client.topology()
            if found.is_complete:
                return found
        except RegistryError as error:
            if error.refusal is not Refusal.UNREACHABLE:
                raise
        await asyncio.sleep(0.02)


def port_of(server: RegistryServer) -> int:
    return int(server.address.rsplit(":", 1)[1])


def test_a_member_is_renewed_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []

    async def pause(registration: Registration, wait_s: float) -> None:
        pauses_s.append(wait_s)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(Registration, "pause", pause)

    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as client:
            await client.register(member(layout="tp1", ttl_s=60.0)).wait()
            dues_s = {server._state.next_expiry()}
            while len(dues_s) < 4:
                await asyncio.sleep(0.001)
                dues_s.add(server._state.next_expiry())
            assert (await client.topology()).is_complete
        assert len(pauses_s) >= 3
        assert 10 < sorted(pauses_s)[len(pauses_s) // 2] < 30, "two renewals may be lost"

    run(body)


def test_a_coordinator_is_told_once_its_instance_is_complete() -> None:
    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as client:
            with pytest.raises(RegistryError, match="'p0' is not complete: not registered") as caught:
                await client.coordinator("p0")
            assert caught.value.refusal is Refusal.INCOMPLETE
            for rank in range(0, 24, 2):
                await client.register(member(rank=rank, layout="tp24")).wait()
            with pytest.raises(RegistryError, match=r"12 of 24 ranks .* \(ranks 1, 3, .*15 and 4 more\)"):
                await client.coordinator("p0")
            for rank in range(1, 24, 2):
                await client.register(member(rank=rank, layout="tp24")).wait()
            assert await client.coordinator("p0") == "10.0.0.1:7000"

    run(body)


def test_closing_unregisters_its_own_members_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "CLOSE_S_MAX", LIMIT_S)

    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as other:
            client = RegistryClient(server.url, SECRET)
            await other.register(member(rank=0)).wait()
            await client.register(member(rank=1)).wait()
            await client.close()
            assert (await other.topology()).instances[0].ranks == (0,)

    run(body)


def test_closing_does_not_wait_for_a_registry_that_is_gone() -> None:
    async def body() -> None:
        async with registry() as server:
            client = RegistryClient(server.url, SECRET)
            await client.register(member()).wait()
        late = client.register(member(rank=1))
        await client.close()
        with pytest.raises(RegistryError, match="client was closed"):
            await late.wait()

    run(body)


def test_a_newer_epoch_ends_the_older_client_once() -> None:
    async def body() -> None:
        reasons: list[str] = []
        async with registry() as server:
            older = RegistryClient(server.url, SECRET, on_displaced=reasons.append)
            for rank in (0, 1):
                await older.register(member(rank=rank, epoch=1, ttl_s=0.6)).wait()
            async with RegistryClient(server.url, SECRET) as newer:
                await newer.register(member(rank=0, epoch=2)).wait()
                await until(lambda: bool(reasons))
                late = older.register(member(rank=1, epoch=1))
                with pytest.raises(RegistryError, match="epoch 1 of instance 'p0' is over"):
                    await late.wait()
                await newer.register(member(rank=1, epoch=2)).wait()
                await older.close()
                assert (await newer.topology()).instances[0].ranks == (0, 1)
        assert len(reasons) == 2  # once for the two members, once for the one that came after
        assert all("epoch 2 has registered" in reason for reason in reasons)

    run(body)


def test_a_conflict_is_said_and_heals_when_its_cause_is_gone() -> None:
    async def body() -> None:
        async with registry() as server, RegistryClient(server.url, SECRET) as client:
            await put(server, member(rank=0, layout="tp4"))
            other = client.register(member(rank=1, layout="tp2"))
            await until(lambda: "layout of rank 1 is 'tp2'" in other.last_error)
            await ask(server, "DELETE", "/v1/members/p0/0?epoch=1")
            await other.wait()
            assert other.last_error == ""
            assert (await client.topology()).instances[0].layout == "tp2"

    run(body)


def test_a_member_that_cannot_be_is_refused_before_it_is_sent() -> None:
    async def body() -> None:
        client = RegistryClient("http://127.0.0.1:1", SECRET)
        with pytest.raises(RegistryError, match="rank must be 0 to 1"):
            client.register(member(rank=2))
        with pytest.raises(RegistryError, match="instance must be"):
            await client.topology("a/b")
        await client.close()

    run(body)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8400", "ftp://x:1", "http://", "http://x:1/path"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="write http://host:port"):
        RegistryClient(url, SECRET)


def test_the_wrong_secret_is_said_and_heals() -> None:
    async def body() -> None:
        first = RegistryServer(b"another secret")
        await first.start(port=free_port())
        async with RegistryClient(first.url, SECRET) as client:
            kept = client.register(member(layout="tp1"))
            await until(lambda: "MAC does not match" in kept.last_error)
            with pytest.raises(RegistryError) as caught:
                await client.topology()
            assert caught.value.refusal is Refusal.UNAUTHENTICATED
            await first.close()
            async with registry(port=port_of(first)):
                await kept.wait()
                assert (await client.topology()).is_complete

    run(body)


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"],
)
def test_an_answer_that_no_registry_gives_is_an_error_with_advice(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with RegistryClient(f"http://127.0.0.1:{port}", SECRET) as client:
            with pytest.raises(RegistryError, match="which no registry says") as caught:
                await client.topology()
            assert caught.value.refusal is Refusal.UNREACHABLE
        server.close()

    run(body)


def test_members_register_again_with_a_registry_that_forgot() -> None:
    async def body() -> None:
        first = RegistryServer(SECRET)
        await first.start(port=free_port())
        async with RegistryClient(first.url, SECRET) as keeper, RegistryClient(first.url, SECRET) as router:
            for rank in (0, 1):
                await keeper.register(member(rank=rank, layout="dp2", ttl_s=3.0)).wait()
            await first.close()
            async with registry(port=port_of(first)):
                await complete(router)
                assert (await router.topology("p0")).instances[0].ranks == (0, 1)

    run(body)


def test_a_restart_that_any_call_notices_is_answered_at_once() -> None:
    async def body() -> None:
        first = RegistryServer(SECRET)
        await first.start(port=free_port())
        async with RegistryClient(first.url, SECRET) as client:
            await client.register(member(layout="tp1", ttl_s=3600.0)).wait()
            await first.close()
            async with registry(port=port_of(first)):
                assert not (await client.topology()).is_complete
                await complete(client)  # long before the next renewal, in 20 minutes

    run(body)


@pytest.mark.slow
def test_kill_9_and_a_new_process_on_the_same_port() -> None:
    async def body(processes: ExitStack) -> None:
        first = processes.enter_context(RegistryProcess(free_port()))
        async with (
            RegistryClient(first.url, SECRET) as one,
            RegistryClient(first.url, SECRET) as two,
            RegistryClient(first.url, SECRET) as asking,
        ):
            for rank, client in enumerate((one, two)):
                await client.register(member(rank=rank, ttl_s=3.0)).wait()
            before = await complete(asking)
            await asyncio.to_thread(first.end, signal.SIGKILL)
            with pytest.raises(RegistryError, match="does not answer"):
                await asking.topology()
            second = processes.enter_context(await asyncio.to_thread(RegistryProcess, first.port))
            after = await complete(asking)
            assert after.id.split("-")[0] != before.id.split("-")[0]
            assert after.instances == before.instances
        assert await asyncio.to_thread(second.end, signal.SIGTERM) == (0, "")

    with ExitStack() as processes:
        run(lambda: body(processes))


def test_a_registry_that_stands_still_is_an_error_in_time_and_heals() -> None:
    async def body(process: RegistryProcess) -> None:
        async with RegistryClient(process.url, SECRET) as client:
            kept = client.register(member(layout="tp1", ttl_s=0.9))
            await kept.wait()
            process.process.send_signal(signal.SIGSTOP)
            await until(lambda: "does not answer" in kept.last_error)
            process.process.send_signal(signal.SIGCONT)
            await until(lambda: kept.last_error == "")
            await complete(client)

    with RegistryProcess() as process:
        run(lambda: body(process))
        assert process.end(signal.SIGINT) == (0, "")
