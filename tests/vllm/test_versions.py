"""The oldest vLLM that the connector knows, in an environment of its own."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.vllm.conftest import LENGTHS, NUM_TOKENS
from tests.vllm.servers import ROOT, Server, check_free, hand_off, run_client, running

from baton.adapters.vllm import VERSIONS

pytestmark = [pytest.mark.vllm, pytest.mark.long]
VERSION = VERSIONS[0]
VENV = ROOT / f".venv-vllm-{VERSION}"


@pytest.fixture(scope="module")
def servers(folder: Path, llama: Path) -> Iterator[dict[str, Server]]:
    """Two that are alike, and one that is not."""
    if not (VENV / "bin/vllm").exists():
        pytest.skip(f"vLLM {VERSION} is not installed: run make setup-vllm-{VERSION}")
    started = {
        name: Server(layout, llama, folder, venv=VENV)
        for name, layout in (("tp1", "tp1"), ("other tp1", "tp1"), ("tp2", "tp2"))
    }
    with running(*started.values()):
        yield started


@pytest.mark.parametrize(("source", "target"), [("other tp1", "tp1"), ("tp2", "tp1"), ("tp1", "tp2")])
def test_handoffs_work_with_the_oldest_version(
    servers: dict[str, Server], prompts: list[list[int]], source: str, target: str
) -> None:
    prefill, decode = servers[source], servers[target]
    assert f"version {VERSION}." in decode.log.read_text(errors="replace"), "another version was started"
    some = prompts[: len(LENGTHS)]

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        right = await asyncio.gather(
            *(decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in some)
        )
        before = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        salt = uuid.uuid4().hex
        got = await asyncio.gather(
            *(hand_off(session, prefill, decode, prompt, NUM_TOKENS, salt=salt) for prompt in some)
        )
        after = await decode.metric(session, "prompt_tokens_by_source_total", source="local_compute")
        await check_free(session, prefill, decode)
        return right, got, after - before

    right, got, num_computed = run_client(ask_all)
    assert [status for status, _ in right] == [200] * len(some)
    assert got == right
    assert num_computed == len(some), "decode computes the last token of each prompt"
