"""Hand-overs between engines: SGLang prefills, vLLM decodes what one SGLang server would."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.serve.parts import until
from tests.sglang.conftest import LENGTHS, NUM_TOKENS
from tests.sglang.servers import ROOT, SglangServer, environment
from tests.sglang.test_engines import coordinator
from tests.sglang.test_handoff import differing
from tests.vllm.servers import ANSWER_S_MAX, VENV, Server, body, check_free, run_client, running

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.long,
    pytest.mark.skipif(not (VENV / ".stamp").exists(), reason="vLLM is not installed: run make setup-vllm"),
]
PAIRS = [("prefill tp1", "tp1"), ("prefill tp2", "tp1"), ("prefill tp1", "tp2")]


@pytest.fixture(scope="module")
def decodes(folder: Path, llama: Path) -> Iterator[dict[str, Server]]:
    """vLLM's decode servers; the third has its blocks as they are."""
    started = {
        name: Server(
            layout,
            llama,
            folder,
            cache_bytes=48 << 20,
            options={"split_kv": is_split},
            transfer={"kv_role": "kv_consumer"},
            env={"BATON_SECRET": environment()["BATON_SECRET"]},
        )
        for name, layout, is_split in (("tp1", "tp1", True), ("tp2", "tp2", True), ("whole", "tp1", False))
    }
    with running(*started.values()):
        yield started


async def hand_off(
    session: aiohttp.ClientSession, prefill: SglangServer, decode: Server, prompt: list[int]
) -> tuple[int, Any]:
    """vLLM's tokens and log-probabilities; both halves are sent at once."""
    bootstrap = coordinator(prefill)
    params = {"do_remote_prefill": True, "transfer_id": str(bootstrap["bootstrap_room"])}
    asked = body(prompt, NUM_TOKENS, params | {"source": prefill.source}, "") | {"logprobs": 0}
    _, (status, answer) = await asyncio.gather(
        prefill.generate(session, prompt, NUM_TOKENS, bootstrap), decode.post(session, asked, {})
    )
    if status != 200:
        return status, answer
    (choice,) = answer["choices"]
    return 200, list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=" to ".join)
def test_vllm_decodes_what_sglang_prefilled(
    servers: dict[str, SglangServer],
    decodes: dict[str, Server],
    prompts: list[list[int]],
    answers: list[Any],
    source: str,
    target: str,
) -> None:
    """Each length, then the same prompts with more tokens, which both sides have in part."""
    prefill, decode = servers[source], decodes[target]
    num_traces = len(prefill.traces())

    async def both_rounds(session: aiohttp.ClientSession) -> Any:
        before = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        got = []
        for some in (prompts[: len(LENGTHS)], prompts[len(LENGTHS) :]):
            got += await asyncio.gather(*(hand_off(session, prefill, decode, prompt) for prompt in some))
        after = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        await check_free(session, decode)
        return got, after - before

    got, num_computed = run_client(both_rounds)
    assert differing(prompts, got, answers) == []
    assert {line["outcome"] for line in prefill.traces()[num_traces:]} == {"ready"}
    assert num_computed <= len(prompts), "decode computes the last token of a prompt again, and no other"


def test_the_example_prints_the_answer(servers: dict[str, SglangServer], decodes: dict[str, Server]) -> None:
    prefill, decode = servers["prefill tp1"], decodes["tp1"]
    command = [
        sys.executable,
        str(ROOT / "examples/sglang_prefill.py"),
        "w5 w17 w400 w81",
        "--engine",
        "vllm",
    ]
    command += ["--prefill", prefill.url, "--source", prefill.source, "--decode", decode.url]
    command += ["--max-tokens", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S_MAX, check=False)
    assert ended.returncode == 0, ended.stderr
    said, answer = ended.stdout.splitlines()
    assert said == "SGLang prefilled 4 tokens; vllm answers:"
    tokens = [int(word.removeprefix("w")) for word in answer.split()]
    assert run_client(lambda session: decode.ask(session, [5, 17, 400, 81], 4, salt="alone")) == (200, tokens)


def test_blocks_that_are_not_split_are_refused(
    servers: dict[str, SglangServer], decodes: dict[str, Server]
) -> None:
    """The message names what either side has, and the setting."""
    prefill, decode = servers["prefill tp1"], decodes["whole"]
    status, answer = run_client(lambda session: hand_off(session, prefill, decode, [5, 6, 7]))
    assert status == 500, answer
    failed = "transfer failed"
    until(lambda: failed in decode.log.read_text(), f"vLLM says why; its log ends:\n{decode.tail()}")
    (line,) = [line for line in decode.log.read_text().splitlines() if failed in line]
    assert "refused (layout)" in line
    assert "start it with split_kv" in line
    assert "k.0" in line
