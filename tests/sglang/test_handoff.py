"""Hand-overs between real SGLang servers: tokens and log-probabilities are those of one server."""

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.sglang.conftest import LENGTHS, NUM_TOKENS
from tests.sglang.servers import SglangServer, check_free, hand_off
from tests.vllm.servers import run_client

pytestmark = pytest.mark.sglang
PAIRS = [("tp1", "tp1"), ("tp2", "tp1"), ("tp1", "tp2")]


def differing(prompts: list[list[int]], got: list[tuple[int, Any]], wanted: list[Any]) -> list[str]:
    return [
        f"{len(prompt)} tokens: {status} {answer}, not {right}"
        for prompt, (status, answer), right in zip(prompts, got, wanted, strict=True)
        if status != 200 or not is_alike(answer, right)
    ]


def is_alike(answer: list[tuple[int, float]], right: list[tuple[int, float]]) -> bool:
    """The same tokens; of log-probabilities the last digits depend on the order of sums."""
    return [token for token, _ in answer] == [token for token, _ in right] and all(
        abs(one - other) < 0.01 for (_, one), (_, other) in zip(answer, right, strict=True)
    )


def check_answers(
    prefill: SglangServer, decode: SglangServer, prompts: list[list[int]], answers: list[Any]
) -> None:
    """All at once: first each length, then the same prompts with more tokens, which prefill has in part."""

    async def both_rounds(session: aiohttp.ClientSession) -> Any:
        got = []
        for some in (prompts[: len(LENGTHS)], prompts[len(LENGTHS) :]):
            got += await asyncio.gather(
                *(hand_off(session, prefill, decode, prompt, NUM_TOKENS) for prompt in some)
            )
        await check_free(session, decode)
        return got

    assert differing(prompts, run_client(both_rounds), answers) == []


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_answers_are_those_of_one_server(
    servers: dict[str, SglangServer],
    prompts: list[list[int]],
    answers: list[Any],
    source: str,
    target: str,
) -> None:
    check_answers(servers[f"prefill {source}"], servers[f"decode {target}"], prompts, answers)


@pytest.mark.parametrize(("source", "target"), [("tp1", "tp1"), ("tp2", "tp1")])
def test_prompts_that_begin_alike_are_prefilled_together(
    servers: dict[str, SglangServer],
    alike: list[list[int]],
    plain_answers: list[Any],
    source: str,
    target: str,
) -> None:
    """Prefill has not seen them: SGLang keeps the pages of one and frees the others' as duplicates."""
    prefill, decode = servers[f"prefill {source}"], servers[f"decode {target}"]

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        got = await asyncio.gather(
            *(hand_off(session, prefill, decode, prompt, NUM_TOKENS) for prompt in alike)
        )
        await check_free(session, prefill, decode)
        return got

    assert differing(alike, run_client(ask_all), plain_answers[-len(alike) :]) == []


def test_layers_leave_before_the_forward_ends(servers: dict[str, SglangServer]) -> None:
    prefill, decode = servers["prefill tp1"], servers["decode tp2"]
    status, _ = run_client(lambda session: hand_off(session, prefill, decode, [11] * 200, 2))
    assert status == 200
    last = prefill.traces()[-1]
    (step,) = last["steps"]
    assert len(step["offered"]) == 4, "each of the four layers is offered by itself"
    early = [copy for copy in last["copies"] if copy["submitted_s"] < step["ended_s"]]
    assert early, f"nothing left before the end of the forward at {step['ended_s']}: {last['copies']}"
