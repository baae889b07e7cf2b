"""A prefill server whose cache is too small: requests are preempted while their prompts wait for decode."""

import asyncio
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.vllm.servers import Server, new_transfer, run_client, running

pytestmark = [pytest.mark.vllm, pytest.mark.long]
NUM_TOKENS = 8
BLOCK_BYTES = 4 * 4 * 128 * 64 * 4
"""Layers, heads, tokens, channels of keys and values, bytes."""
PREEMPTED_S_MAX = 300.0
OPTIONS = {"offer_s": PREEMPTED_S_MAX}
"""Decode asks when the others have grown enough, which takes a busy machine a minute."""


@pytest.fixture(scope="module")
def pair(folder: Path, llama: Path) -> Iterator[tuple[Server, ...]]:
    small = Server("tp1", llama, folder, cache_bytes=18 * BLOCK_BYTES, options=OPTIONS)
    with running(small, Server("tp1", llama, folder, options=OPTIONS)) as started:
        yield started


def test_a_preempted_prompt_is_handed_over_all_the_same(pair: tuple[Server, ...]) -> None:
    """Older requests grow until vLLM takes the blocks of the two that are handed over."""
    prefill, decode = pair
    chance = random.Random(2)
    *others, first, second = [[chance.randrange(3, 1000) for _ in range(380)] for _ in range(5)]

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        right = [await decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in (first, second)]
        growing = [asyncio.ensure_future(prefill.ask(session, prompt, 380)) for prompt in others]
        await asyncio.sleep(0.3)
        transfers = [new_transfer(prefill.source) for _ in range(2)]
        salt = uuid.uuid4().hex
        sent = [
            asyncio.ensure_future(prefill.ask(session, prompt, 300, params, salt))
            for prompt, (params, _) in zip((first, second), transfers, strict=True)
        ]
        async with asyncio.timeout(PREEMPTED_S_MAX):
            while not await prefill.metric(session, "num_preemptions_total"):
                await asyncio.sleep(0.05)
        got = await asyncio.gather(
            *(
                decode.ask(session, prompt, NUM_TOKENS, params, salt)
                for prompt, (_, params) in zip((first, second), transfers, strict=True)
            )
        )
        ends = await asyncio.gather(*growing, *sent)
        async with asyncio.timeout(PREEMPTED_S_MAX):
            while await prefill.metric(session, "kv_cache_usage_perc"):
                await asyncio.sleep(0.2)
        return right, got, [status for status, _ in ends]

    right, got, statuses = run_client(ask_all)
    assert got == right
    assert statuses == [200] * 5
    starts = [[step["offered"][0][1][0] for step in line["steps"].values()] for line in prefill.traces()]
    assert any(tokens.count(0) > 1 for tokens in starts), (
        f"none was sent again from its first token: {starts}"
    )
