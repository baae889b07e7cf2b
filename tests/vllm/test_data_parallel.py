"""A data-parallel prefill server: each of its engines is a source of its own."""

import asyncio
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.vllm.servers import Server, check_free, new_transfer, run_client, running

pytestmark = [pytest.mark.vllm, pytest.mark.long]
NUM_TOKENS = 8
LENGTHS = (2, 127, 128, 129, 300, 512, 1000, 1500)


@pytest.fixture(scope="module")
def pair(folder: Path, llama: Path) -> Iterator[tuple[Server, ...]]:
    with running(Server("dp2", llama, folder), Server("tp1", llama, folder)) as started:
        yield started


def test_either_engine_prefills(pair: tuple[Server, ...]) -> None:
    """The client names the engine to vLLM by a header, and to decode by the engine's port."""
    prefill, decode = pair
    chance = random.Random(9)
    prompts = [[chance.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]

    async def hand_off(session: aiohttp.ClientSession, prompt: list[int], engine: int) -> Any:
        sent, wanted = new_transfer(f"127.0.0.1:{prefill.kv_port + engine}")
        salt, header = uuid.uuid4().hex, {"X-data-parallel-rank": str(engine)}
        prefilled, decoded = await asyncio.gather(
            prefill.ask(session, prompt, 1, sent, salt, **header),
            decode.ask(session, prompt, NUM_TOKENS, wanted, salt),
        )
        assert prefilled[0] == 200, prefilled
        return decoded

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        right = [await decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in prompts]
        got = await asyncio.gather(
            *(hand_off(session, prompt, engine) for prompt in prompts for engine in (0, 1))
        )
        await check_free(session, prefill)  # then the traces are written
        return right, got

    right, got = run_client(ask_all)
    assert got == [answer for answer in right for _ in (0, 1)]
    assert {line["rank"] for line in prefill.traces()} == {0}
    assert len(list(prefill.trace.iterdir())) == 2, "both engines have sent"
