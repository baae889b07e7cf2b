"""Faults between real vLLM servers: requests end in right answers or clean errors, and blocks come back."""

import asyncio
import random
import uuid
from typing import Any

import aiohttp
import pytest
from tests.ports import free_port
from tests.vllm.servers import (
    Server,
    check_free,
    check_right,
    hand_off,
    new_transfer,
    random_prompts,
    run_client,
)

pytestmark = pytest.mark.vllm
NUM_TOKENS = 8


@pytest.fixture(params=["tp1 to tp2", "tp2 to tp1"])
def pair(request: pytest.FixtureRequest, servers: dict[str, Server]) -> tuple[Server, Server]:
    source, _, target = request.param.split()
    return servers[source], servers[target]


def test_requests_that_clients_give_up_free_their_blocks(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair

    async def give_up(session: aiohttp.ClientSession) -> None:
        chance = random.Random(3)
        halves = []
        for prompt in random_prompts(30, 900):
            sent, wanted = new_transfer(prefill.source)
            salt = uuid.uuid4().hex
            halves += [
                prefill.ask(session, prompt, 1, sent, salt),
                decode.ask(session, prompt, 64, wanted, salt),
            ]
        tasks = [asyncio.ensure_future(half) for half in halves]
        for task in tasks:
            asyncio.get_running_loop().call_later(chance.uniform(0.0, 2.0), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        await check_free(session, prefill, decode)
        await check_right(session, prefill, decode)

    run_client(give_up)


def test_a_source_that_is_not_there_is_handled_by_vllms_policy(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair

    async def ask_nobody(session: aiohttp.ClientSession) -> None:
        _, wanted = new_transfer(f"127.0.0.1:{free_port()}")
        (prompt,) = random_prompts(1, 200)
        right = await decode.ask(session, prompt, NUM_TOKENS, salt="alone")
        status, answer = await decode.ask(session, prompt, NUM_TOKENS, wanted)
        if decode.transfer.get("kv_load_failure_policy") == "recompute":
            assert (status, answer) == right
        else:
            assert status >= 500, answer
        await check_free(session, decode)
        await check_right(session, prefill, decode)

    run_client(ask_nobody)


def test_a_killed_server_is_survived_and_used_again(
    servers: dict[str, Server], pair: tuple[Server, Server]
) -> None:
    prefill, decode = pair
    killed, survivor = servers["tp1"], servers["tp2"]
    some = random_prompts(8, 1500)

    async def kill_within(session: aiohttp.ClientSession) -> list[Any]:
        tasks = [
            asyncio.ensure_future(
                hand_off(session, prefill, decode, prompt, NUM_TOKENS, salt=uuid.uuid4().hex)
            )
            for prompt in some
        ]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(killed.kill)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await check_free(session, survivor)
        return ends

    async def ask_survivor(session: aiohttp.ClientSession) -> list[Any]:
        return [await survivor.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in some]

    ends, right = run_client(kill_within), run_client(ask_survivor)
    assert [status for status, _ in right] == [200] * len(some)
    for end, (_, tokens) in zip(ends, right, strict=True):
        if not isinstance(end, Exception) and end[0] == 200:
            assert end[1] == tokens, "an answer on missing data"
    killed.start()
    killed.wait_ready()
    run_client(lambda session: check_right(session, prefill, decode))
