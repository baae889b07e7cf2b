"""Clients that close their connections before, during and after a hand-over, while engines are held still."""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from tests.vllm.servers import (
    FREE_S_MAX,
    Server,
    check_free,
    check_right,
    new_transfer,
    pass_on,
    random_prompts,
    run_client,
    until_blocks,
)

pytestmark = pytest.mark.vllm
NUM_TOKENS = 8
NUM_TOKENS_LONG = 1100
"""Of an answer that nobody reads to its end."""


@pytest.fixture(params=["tp1 to tp2", "tp2 to tp1"])
def pair(request: pytest.FixtureRequest, servers: dict[str, Server]) -> tuple[Server, Server]:
    source, _, target = request.param.split()
    return servers[source], servers[target]


@dataclass
class Handoff:
    """One prompt, its two halves and the right answer."""

    session: aiohttp.ClientSession
    prefill: Server
    decode: Server
    prompt: list[int] = field(default_factory=lambda: random_prompts(1, 900)[0])
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.sent, self.wanted = new_transfer(self.prefill.source)
        self.deadlines = self._deadlines()

    def _deadlines(self) -> list[str]:
        """Transfers that ended because a deadline passed, by what prefill and decode say of them."""
        said = [line["outcome"] for line in self.prefill.traces()]
        said += self.decode.log.read_text(errors="replace").splitlines()
        return [line for line in said if "deadline passed" in line]

    async def send_prefill(self) -> None:
        status, answer = await self.prefill.ask(self.session, self.prompt, 1, self.sent, self.salt)
        assert status == 200, answer

    def stream_decode(self) -> Any:
        return self.decode.stream(self.session, self.prompt, NUM_TOKENS_LONG, self.wanted, self.salt)

    def stream_prefill(self) -> Any:
        return self.prefill.stream(self.session, self.prompt, NUM_TOKENS_LONG, self.sent, self.salt)

    async def right(self) -> tuple[int, Any]:
        return await self.decode.ask(self.session, self.prompt, NUM_TOKENS, salt="alone")

    async def check_end(self) -> None:
        """All blocks are free, none that decode kept is wrong, and both servers serve on."""
        await check_free(self.session, self.prefill, self.decode)
        assert self._deadlines() == self.deadlines, "one side was not told that the other does not go on"
        again = await self.decode.ask(self.session, self.prompt, NUM_TOKENS, salt=self.salt)
        assert again == await self.right(), "a block that was not complete is in decode's prefix cache"
        await check_right(self.session, self.prefill, self.decode)
        await check_free(self.session, self.prefill, self.decode)


async def until_ended(session: aiohttp.ClientSession, server: Server) -> None:
    """No request runs."""
    async with asyncio.timeout(FREE_S_MAX):
        while await server.metric(session, "num_requests_running"):
            await asyncio.sleep(0.05)


def test_decodes_client_leaves_before_prefill_has_come(pair: tuple[Server, Server]) -> None:
    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        async with request.stream_decode():
            await until_blocks(session, request.decode)
        await check_free(session, request.decode)
        await request.send_prefill()
        await request.check_end()

    run_client(leave)


def test_decodes_client_leaves_before_its_request_has_blocks(pair: tuple[Server, Server]) -> None:
    """Prefill holds the computed prompt; decode's engine hears of the request and of its end at once."""

    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        await request.send_prefill()
        with request.decode.frozen():
            async with request.stream_decode():
                await pass_on(session, request.decode)
            await pass_on(session, request.decode)
        await request.check_end()

    run_client(leave)


def test_decodes_client_leaves_while_its_blocks_are_written(pair: tuple[Server, Server]) -> None:
    """Decode has asked for the prompt and stands still, so that no copy ends before the client leaves."""

    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        async with request.stream_decode() as stream:
            await until_blocks(session, request.decode)
            with request.decode.frozen():
                await request.send_prefill()
                stream.close()
                await pass_on(session, request.decode)
        await request.check_end()

    run_client(leave)


def test_decodes_client_leaves_while_prefill_may_write(pair: tuple[Server, Server]) -> None:
    """Prefill has computed the prompt and stands still when decode asks for it."""

    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        await request.send_prefill()
        with request.prefill.frozen():
            async with request.stream_decode():
                await until_blocks(session, request.decode)
            await until_ended(session, request.decode)
        await request.check_end()

    run_client(leave)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_decodes_client_leaves_in_the_middle_of_its_answer(pair: tuple[Server, Server], first: str) -> None:
    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        _, right = await request.right()
        before = await request.decode.metric(session, "generation_tokens_total")
        if first == "prefill":
            await request.send_prefill()
        async with request.stream_decode() as stream:
            if first == "decode":
                await until_blocks(session, request.decode)
                prefilling = asyncio.ensure_future(request.send_prefill())
            got = await stream.tokens()
            with request.decode.frozen():
                stream.close()
                await pass_on(session, request.decode)
        if first == "decode":
            await prefilling
        assert got
        assert got[:NUM_TOKENS] == right[: len(got)]
        await check_free(session, request.decode)
        num_tokens = await request.decode.metric(session, "generation_tokens_total") - before
        assert num_tokens < NUM_TOKENS_LONG, "the answer was computed for nobody"
        await request.check_end()

    run_client(leave)


def test_prefills_client_leaves_and_decode_gets_the_prompt(pair: tuple[Server, Server]) -> None:
    """What was computed for decode is kept when prefill's own output is not wanted any more."""

    async def leave(session: aiohttp.ClientSession) -> Any:
        request = Handoff(session, *pair)
        right = await request.right()
        async with request.stream_prefill() as stream:
            assert await stream.tokens()
        await until_ended(session, request.prefill)
        before = await request.decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        got = await request.decode.ask(session, request.prompt, NUM_TOKENS, request.wanted, request.salt)
        after = await request.decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        assert got == right
        assert after - before <= 1
        await request.check_end()

    run_client(leave)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_prefills_client_leaves_before_the_prompt_is_computed(
    pair: tuple[Server, Server], first: str
) -> None:
    """Decode's request ends as vLLM's policy for failed loads says.

    A quick vLLM may have computed the prompt before it looks whether its client is still there.
    """

    async def leave(session: aiohttp.ClientSession) -> None:
        request = Handoff(session, *pair)
        right = await request.right()
        asked = request.decode.ask(session, request.prompt, NUM_TOKENS, request.wanted, request.salt)
        if first == "decode":
            decoding = asyncio.ensure_future(asked)
            await until_blocks(session, request.decode)
        with request.prefill.frozen():
            async with request.stream_prefill():
                await pass_on(session, request.prefill)
            await pass_on(session, request.prefill)
        if first == "prefill":
            decoding = asyncio.ensure_future(asked)
        status, answer = await decoding
        if request.decode.transfer.get("kv_load_failure_policy") == "recompute":
            assert (status, answer) == right
        else:
            assert status >= 500 or (status, answer) == right, answer
        await request.check_end()

    run_client(leave)
