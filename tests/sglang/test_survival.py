"""Faults between real SGLang servers: requests end in right answers or clean errors, and pages come back."""

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from tests.sglang.conftest import LENGTHS, NUM_TOKENS
from tests.sglang.servers import SglangServer, check_free, hand_off
from tests.sglang.test_handoff import differing, is_alike
from tests.vllm.servers import random_prompts, run_client

pytestmark = pytest.mark.sglang


def test_requests_that_clients_give_up_free_their_pages(
    servers: dict[str, SglangServer], prompts: list[list[int]], answers: list[Any]
) -> None:
    prefill, decode = servers["prefill tp2"], servers["decode tp1"]
    longest = len(LENGTHS) - 1

    async def give_up(session: aiohttp.ClientSession) -> Any:
        chance = random.Random(3)
        tasks = [
            asyncio.ensure_future(half)
            for number, prompt in enumerate(random_prompts(12, 800))
            for half in (
                prefill.generate(session, prompt, 64, prefill.bootstrap(number + 1)),
                decode.generate(session, prompt, 64, prefill.bootstrap(number + 1)),
            )
        ]
        for task in tasks:
            asyncio.get_running_loop().call_later(chance.uniform(0.0, 3.0), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        await check_free(session, decode)
        return [await hand_off(session, prefill, decode, prompts[longest], NUM_TOKENS)]

    assert differing([prompts[longest]], run_client(give_up), [answers[longest]]) == []


@pytest.mark.parametrize("killed", ["prefill tp1", "decode tp1"])
def test_a_killed_server_is_survived_and_used_again(
    servers: dict[str, SglangServer], prompts: list[list[int]], answers: list[Any], killed: str
) -> None:
    """Whoever answers 200 answers right; the one that is left serves the other pair and the new server."""
    prefill = servers["prefill tp1"]
    decode = servers["decode tp2" if killed == "prefill tp1" else "decode tp1"]
    lone = decode if killed == "prefill tp1" else prefill
    some = [*range(len(LENGTHS) - 8, len(LENGTHS))]

    async def kill_within(session: aiohttp.ClientSession) -> list[Any]:
        tasks = [
            asyncio.ensure_future(hand_off(session, prefill, decode, prompts[number], NUM_TOKENS))
            for number in some
        ]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(servers[killed].kill)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if lone is decode:
            await check_free(session, decode)
        return ends

    for number, end in zip(some, run_client(kill_within), strict=True):
        if not isinstance(end, Exception) and end[0] == 200:
            assert is_alike(end[1], answers[number]), f"an answer on missing data: {end[1]}"
    servers[killed].start()
    servers[killed].wait_ready()

    async def ask_again(session: aiohttp.ClientSession) -> Any:
        return [await hand_off(session, prefill, decode, prompts[number], NUM_TOKENS) for number in some[-2:]]

    again = run_client(ask_again)
    assert differing([prompts[n] for n in some[-2:]], again, [answers[n] for n in some[-2:]]) == []
