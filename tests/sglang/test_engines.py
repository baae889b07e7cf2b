"""Hand-overs between engines: SGLang prefills, Baton's own engine decodes what one SGLang server would."""

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.ports import free_port
from tests.serve.parts import Part, until
from tests.sglang.conftest import LENGTHS, NUM_TOKENS
from tests.sglang.servers import DEADLINES, ROOT, SglangServer, environment, generate
from tests.sglang.test_handoff import differing
from tests.sglang.test_router import check_routed, is_installed
from tests.vllm.servers import ANSWER_S_MAX, START_S_MAX, run_client

pytestmark = pytest.mark.sglang


PAIRS = [("prefill tp1", "tp2"), ("prefill tp2", "pp2")]


def baton_decode(layout: str, model: Path, folder: Path) -> Part:
    """Baton's engine; its pages and their order are not SGLang's either."""
    words = ["serve", "--role", "decode", "--layout", layout, "--device", "cpu", "--transport", "tcp"]
    words += ["--silence-s", str(DEADLINES["silence_s"]), "--progress-s", str(DEADLINES["progress_s"])]
    part = Part(f"{model.name}.{layout}", [*words, "--model", str(model)], free_port(), folder)
    part.environment["BATON_SECRET"] = environment()["BATON_SECRET"]
    return part


@pytest.fixture(scope="module", params=PAIRS, ids=" to ".join)
def pair(
    servers: dict[str, SglangServer], folder: Path, llama: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[SglangServer, Part]]:
    """A prefill server of SGLang, and one of Baton that knows no prompt yet."""
    source, target = request.param
    with baton_decode(target, llama, folder) as decode:
        yield servers[source], decode.wait(START_S_MAX)


def coordinator(prefill: SglangServer) -> dict[str, Any]:
    """What a router adds to a request: Baton asks the coordinator itself, not SGLang's bootstrap server."""
    return prefill.bootstrap(random.getrandbits(62)) | {"bootstrap_port": prefill.kv_port}


async def hand_off(
    session: aiohttp.ClientSession, prefill: SglangServer, decode: Part, prompt: list[int]
) -> tuple[int, Any]:
    """Decode's answer to a request whose halves are sent at once."""
    bootstrap = coordinator(prefill)
    _, decoded = await asyncio.gather(
        prefill.generate(session, prompt, NUM_TOKENS, bootstrap),
        generate(session, decode.url, prompt, NUM_TOKENS, bootstrap),
    )
    return decoded


def prefill_rate(decode: Part) -> float:
    """It changes with every step that computes tokens of a prompt, and with nothing else."""
    return float(decode.ask("/server_info").json["rates"]["prefill_tokens_per_s"])


def test_baton_decodes_what_sglang_prefilled(
    pair: tuple[SglangServer, Part], prompts: list[list[int]], answers: list[Any]
) -> None:
    """Each length, then the same prompts with more tokens, which both sides have in part."""
    prefill, decode = pair
    rate, num_traces = prefill_rate(decode), len(prefill.traces())

    async def both_rounds(session: aiohttp.ClientSession) -> Any:
        got = []
        for some in (prompts[: len(LENGTHS)], prompts[len(LENGTHS) :]):
            got += await asyncio.gather(*(hand_off(session, prefill, decode, prompt) for prompt in some))
        return got

    assert differing(prompts, run_client(both_rounds), answers) == []
    assert {line["outcome"] for line in prefill.traces()[num_traces:]} == {"ready"}
    assert prefill_rate(decode) == rate, "decode has computed tokens of a prompt"
    # Had it done so, this would show it.
    run_client(lambda session: generate(session, decode.url, prompts[-1][::-1], NUM_TOKENS))
    until(lambda: prefill_rate(decode) != rate, "a prompt without a room changes the rate of prefill")


def test_the_example_prints_the_answer(pair: tuple[SglangServer, Part]) -> None:
    prefill, decode = pair
    text = "w5 w17 w400 w81"
    command = [sys.executable, str(ROOT / "examples/sglang_prefill.py"), text]
    command += ["--prefill", prefill.url, "--source", prefill.source, "--decode", decode.url]
    command += ["--max-tokens", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S_MAX, check=False)
    assert ended.returncode == 0, ended.stderr
    said, answer = ended.stdout.splitlines()
    assert said == "SGLang prefilled 4 tokens; baton answers:"
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    assert decode.ask("/generate", body).json["text"] == answer


@is_installed
def test_the_stock_router_stands_before_both(
    folder: Path, pair: tuple[SglangServer, Part], prompts: list[list[int]], answers: list[Any]
) -> None:
    prefill, decode = pair
    check_routed(folder, prefill, prefill.kv_port, decode.url, prompts, answers)


def test_other_weights_are_refused(servers: dict[str, SglangServer], folder: Path, llama: Path) -> None:
    """The models differ in one bit of one tensor; their caches have the same shape."""
    other = shutil.copytree(llama, folder / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with baton_decode("tp1", other, folder) as decode:
        decode.wait(START_S_MAX)
        bootstrap = coordinator(servers["prefill tp1"])
        status, answer = run_client(lambda session: generate(session, decode.url, [5, 6], 2, bootstrap))
    assert status == 502, answer
    assert "start both with the same config and weights" in str(answer)
