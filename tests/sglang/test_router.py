"""SGLang's routers in front of SGLang servers with Baton between them."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.ports import free_port
from tests.serve.parts import until
from tests.sglang.conftest import LENGTHS, NUM_TOKENS
from tests.sglang.servers import SglangServer, read_answer
from tests.sglang.test_handoff import is_alike
from tests.vllm.servers import END_S_MAX, run_client

MODULE = "sglang_router"
START_S_MAX = 300.0
SOME = [LENGTHS.index(length) for length in (1, 129, 640)]
is_installed = pytest.mark.skipif(
    importlib.util.find_spec(MODULE) is None, reason=f"{MODULE} is not installed"
)
pytestmark = [pytest.mark.sglang, is_installed]


@pytest.mark.parametrize("is_mini", [False, True], ids=["sglang-router", "mini load balancer"])
def test_the_stock_routers_hand_requests_over(
    folder: Path,
    servers: dict[str, SglangServer],
    prompts: list[list[int]],
    answers: list[Any],
    is_mini: bool,
) -> None:
    prefill, decode_url = servers["prefill tp2"], servers["decode tp1"].url
    check_routed(folder, prefill, prefill.bootstrap_port, decode_url, prompts, answers, is_mini=is_mini)


def check_routed(
    folder: Path,
    prefill: SglangServer,
    bootstrap_port: int,
    decode_url: str,
    prompts: list[list[int]],
    answers: list[Any],
    *,
    is_mini: bool = False,
) -> None:
    """Asks two servers through sglang-router or the mini load balancer."""
    port = free_port()
    command = [
        *(sys.executable, "-m", f"{MODULE}.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"),
        *("--port", str(port), "--prefill", prefill.url, str(bootstrap_port)),
        *("--decode", decode_url, "--prometheus-port", str(free_port()), "--disable-retries"),
        *(["--mini-lb"] if is_mini else []),
    ]
    url = f"http://127.0.0.1:{port}"
    num_traces = len(prefill.traces())

    async def is_up(session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{url}/{'health' if is_mini else 'workers'}") as response:
                if is_mini:
                    return response.status == 200
                workers = (await response.json())["workers"]
        except (OSError, aiohttp.ClientError):
            return False
        return [worker["is_healthy"] for worker in workers] == [True, True]

    async def ask(session: aiohttp.ClientSession) -> list[Any]:
        got = []
        for number in SOME:
            asked = {
                "input_ids": prompts[number],
                "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
                "return_logprob": True,
            }
            async with session.post(f"{url}/generate", json=asked) as response:
                assert response.status == 200, await response.text()
                got.append(read_answer(await response.json(content_type=None)))
        return got

    with (folder / "router.log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: run_client(is_up), "the router knows both servers", START_S_MAX, 0.5)
        got = run_client(ask)
    finally:
        router.terminate()
        router.wait(END_S_MAX)
    for number, answer in zip(SOME, got, strict=True):
        assert is_alike(answer, answers[number]), f"{len(prompts[number])} tokens: {answer}"
    assert len(prefill.traces()) > num_traces, "nothing was handed over"
