"""Models with other caches than Llama's, between real vLLM servers: experts, windows, latents, states."""

import asyncio
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.vllm.conftest import MODELS_S_MAX
from tests.vllm.servers import Server, hand_off, run, run_client, running

pytestmark = [pytest.mark.vllm, pytest.mark.long]
NUM_TOKENS = 8
STEP_S_MAX = 300.0
"""A first long step takes more than a minute on a busy machine."""
LENGTHS = (2, 40, 128, 129, 255, 256, 257, 258, 383, 384, 385, 500, 511, 512, 513, 700, 1000, 1300)
"""With a window of 256 tokens, blocks of 128 leave it at every place."""


@pytest.fixture(scope="module", params=["qwen3_moe", "gemma3", "deepseek_v2", "falcon_h1", "llama over shm"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Server, ...]]:
    """Every chunk is verified: decode compares a checksum of the bytes in its memory with prefill's."""
    name, _, transport = request.param.partition(" over ")
    model = folder / name
    assert run("models.py", name, str(model)).wait(MODELS_S_MAX) == 0
    options = {
        "verify": True,
        "transport": transport or "tcp",
        "offer_s": STEP_S_MAX,
        "progress_s": STEP_S_MAX,
    }
    args = ("--no-enable-prefix-caching",) if name == "falcon_h1" else ()
    servers = (Server(layout, model, folder, options=options, args=args) for layout in ("tp1", "tp2"))
    with running(*servers) as started:
        yield started


@pytest.mark.parametrize("is_split", [False, True], ids=["tp2 to tp1", "tp1 to tp2"])
def test_decode_goes_on_from_the_cache_that_prefill_computed(
    pair: tuple[Server, ...], is_split: bool
) -> None:
    prefill, decode = pair if is_split else pair[::-1]
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        right = await asyncio.gather(
            *(decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in prompts)
        )
        names = ("local_compute", "external_kv_transfer")
        before = [
            await decode.metric(session, "prompt_tokens_by_source_total", source=name) for name in names
        ]
        salt = uuid.uuid4().hex
        got = await asyncio.gather(
            *(hand_off(session, prefill, decode, prompt, NUM_TOKENS, salt=salt) for prompt in prompts)
        )
        after = [await decode.metric(session, "prompt_tokens_by_source_total", source=name) for name in names]
        return right, got, [int(now - then) for now, then in zip(after, before, strict=True)]

    right, got, counts = run_client(ask_all)
    assert counts == [len(LENGTHS), sum(LENGTHS) - len(LENGTHS)]
    assert [status for status, _ in got] == [200] * len(LENGTHS)
    if decode.model.name != "deepseek_v2":  # there vLLM's own prefill and decode kernels disagree on a CPU
        wrong = [len(prompt) for prompt, one, other in zip(prompts, got, right, strict=True) if one != other]
        assert wrong == []
