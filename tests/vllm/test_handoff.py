"""Hand-overs between real vLLM servers: the tokens are those of vLLM without a connector."""

import asyncio
import uuid
from typing import Any

import aiohttp
import pytest
from tests.vllm.conftest import LENGTHS, NUM_TOKENS
from tests.vllm.servers import Server, check_free, hand_off, new_transfer, pass_on, run_client, until_blocks

pytestmark = pytest.mark.vllm
PAIRS = [("tp2", "tp1"), ("tp1", "tp2"), ("tp2", "tp2"), ("pp2", "tp1"), ("tp1", "pp2"), ("pp2", "tp2")]
ORDERS = ("", "prefill", "decode")


def differing(prompts: list[list[int]], got: list[tuple[int, Any]], wanted: list[list[int]]) -> list[str]:
    return [
        f"{len(prompt)} tokens: {status} {answer}, not {right}"
        for prompt, (status, answer), right in zip(prompts, got, wanted, strict=True)
        if (status, answer) != (200, right)
    ]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_tokens_are_those_of_plain_vllm(
    servers: dict[str, Server],
    prompts: list[list[int]],
    answers: list[list[int]],
    source: str,
    target: str,
) -> None:
    """All at once and in any order: first cold, then with prefix hits on both sides."""
    prefill, decode, salt = servers[source], servers[target], uuid.uuid4().hex

    async def hand_off_all(session: aiohttp.ClientSession, some: list[list[int]]) -> Any:
        before = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        got = await asyncio.gather(
            *(
                hand_off(session, prefill, decode, prompt, NUM_TOKENS, salt=salt, first=ORDERS[number % 3])
                for number, prompt in enumerate(some)
            )
        )
        after = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        return got, after - before

    async def both_rounds(session: aiohttp.ClientSession) -> Any:
        cold = await hand_off_all(session, prompts[: len(LENGTHS)])
        hits = await decode.metric(session, "prefix_cache_hits_total")
        warm = await hand_off_all(session, prompts[len(LENGTHS) :])
        return cold, warm, await decode.metric(session, "prefix_cache_hits_total") - hits

    (cold, num_cold), (warm, num_warm), num_hits = run_client(both_rounds)
    assert differing(prompts, [*cold, *warm], answers) == []
    # Decode computes the last token of each prompt. Both halves of a pair may be one server.
    if source != target:
        assert num_cold <= len(LENGTHS)
        assert num_warm <= len(LENGTHS)
        assert num_hits >= sum(length // 128 * 128 for length in LENGTHS)


def test_a_cold_prefix_that_is_computed_in_the_same_step_is_right(servers: dict[str, Server]) -> None:
    """Several requests share a prefix that nobody has computed; vLLM computes it once, for the first."""
    prefill, decode = servers["tp1"], servers["tp2"]

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        shared = [*range(3, 3 + 256)]
        some = [[*shared, *(500 + number * 7 + i for i in range(40))] for number in range(6)]
        right = [await decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in some]
        salt = uuid.uuid4().hex
        # All are there when the engine goes on; while it computes the first one, the others gather.
        with prefill.frozen():
            busy = asyncio.ensure_future(prefill.ask(session, [7] * 1800, 1, salt=salt))
            await pass_on(session, prefill)
            transfers = [new_transfer(prefill.source) for _ in some]
            prefills = [
                asyncio.ensure_future(prefill.ask(session, prompt, 1, sent, salt))
                for prompt, (sent, _) in zip(some, transfers, strict=True)
            ]
            await pass_on(session, prefill)
        got = await asyncio.gather(
            *(
                decode.ask(session, prompt, NUM_TOKENS, wanted, salt)
                for prompt, (_, wanted) in zip(some, transfers, strict=True)
            )
        )
        await asyncio.gather(busy, *prefills)
        # A poisoned prefix cache would show in the next answer.
        again = await decode.ask(session, some[0], NUM_TOKENS, salt=salt)
        await check_free(session, prefill)  # then the traces are written
        return some, right, [*got, again]

    some, right, got = run_client(ask_all)
    assert differing([*some, some[0]], got, [tokens for _, tokens in [*right, right[0]]]) == []
    last = prefill.traces()[-len(some) :]
    steps = [(line["blocks"][0][0], min(map(int, line["steps"]))) for line in last]
    assert len(set(steps)) < len(steps), f"no two requests shared a block and a step: {steps}"


def test_layers_leave_before_the_forward_ends(servers: dict[str, Server]) -> None:
    """Of some prompts at least: a busy machine may compute all four layers before it runs another thread."""
    prefill, decode = servers["tp1"], servers["tp2"]
    prompts = [[start] * 1500 for start in range(11, 17)]

    async def ask_granted(session: aiohttp.ClientSession) -> None:
        for prompt in prompts:
            await check_free(session, decode)
            sent, wanted = new_transfer(prefill.source)
            salt = uuid.uuid4().hex
            decoding = asyncio.ensure_future(decode.ask(session, prompt, 2, wanted, salt))
            await until_blocks(session, decode)
            assert (await prefill.ask(session, prompt, 1, sent, salt))[0] == 200
            assert (await decoding)[0] == 200
        await check_free(session, prefill)

    run_client(ask_granted)
    early = []
    for line in prefill.traces()[-len(prompts) :]:
        step = line["steps"][min(line["steps"], key=int)]
        early += [copy for copy in line["copies"] if copy["submitted_s"] < step["ended_s"]]
    assert early, f"nothing left before the end of a forward: {prefill.traces()[-1]}"


def test_a_proxy_that_waits_for_prefill_passes_its_parameters_on(
    servers: dict[str, Server], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    prefill, decode = servers["tp2"], servers["tp1"]
    prompt, right = prompts[LENGTHS.index(300)], answers[LENGTHS.index(300)]

    async def ask_in_turn(session: aiohttp.ClientSession) -> Any:
        salt = uuid.uuid4().hex
        status, answer = await prefill.ask(session, prompt, 1, {"do_remote_decode": True}, salt)
        assert status == 200, answer
        before = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        got = await decode.ask(session, prompt, NUM_TOKENS, answer["kv_transfer_params"], salt)
        after = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        return got, after - before

    got, num_computed = run_client(ask_in_turn)
    assert got == (200, right)
    assert num_computed <= 1


def test_all_blocks_are_free_when_nothing_runs(servers: dict[str, Server]) -> None:
    run_client(lambda session: check_free(session, *servers.values()))
