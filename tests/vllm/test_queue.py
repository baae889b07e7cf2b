"""Requests that wait in vLLM's own queue for longer than a transfer may go unmentioned."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from tests.vllm.servers import FREE_S_MAX, Server, check_free, hand_off, random_prompts, run_client, running

pytestmark = [pytest.mark.vllm, pytest.mark.long]
OFFER_S = 20.0
NUM_BEFORE = 60
"""Requests that the queue is full of: more than a quick machine computes in the time that is waited."""
NUM_TOKENS_LONG = 1900


@pytest.fixture(scope="module")
def pair(folder: Path, llama: Path) -> Iterator[tuple[Server, ...]]:
    options = {"offer_s": OFFER_S}
    servers = [
        Server("tp1", llama, folder, options=options, args=("--max-num-seqs", "1"), cache_bytes=64 << 20)
        for _ in range(2)
    ]
    with running(*servers) as started:
        yield started


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_request_in_a_queue_that_moves_is_handed_over(pair: tuple[Server, ...], full: str) -> None:
    prefill, decode = pair
    (prompt,) = random_prompts(1, 300)

    async def wait_in_queue(session: aiohttp.ClientSession) -> None:
        right = await decode.ask(session, prompt, 8, salt="alone")
        server = prefill if full == "prefill" else decode
        async with AsyncExitStack() as before:
            for other in random_prompts(NUM_BEFORE, 20):
                await before.enter_async_context(server.stream(session, other, NUM_TOKENS_LONG))
            asked = asyncio.ensure_future(
                hand_off(session, prefill, decode, prompt, 8, salt=uuid.uuid4().hex)
            )
            await asyncio.sleep(2.5 * OFFER_S)
            assert await server.metric(session, "num_requests_waiting"), "nothing waits in the queue"
        async with asyncio.timeout(FREE_S_MAX):
            assert await asked == right
        await check_free(session, prefill, decode)

    run_client(wait_in_queue)
