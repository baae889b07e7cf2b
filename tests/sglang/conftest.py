"""Servers that all tests of this folder share; they start once, at the same time."""

import asyncio
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.sglang.servers import ROOT, VENV, SglangServer, environment
from tests.vllm.servers import run_client, running

NUM_TOKENS = 8
LENGTHS = (
    *(1, 2, 5, 17, 40, 90, 127, 128, 129, 200, 255, 256),
    *(257, 300, 350, 384, 385, 450, 511, 512, 513, 640, 768, 900),
)
EXTRA = 60
"""Tokens that a prompt is extended by, so that all before is a prefix hit at prefill."""
MODELS_S_MAX = 600.0


@pytest.fixture(scope="session", autouse=True)
def _sglang_is_installed() -> None:
    if not (VENV / ".stamp").exists():
        pytest.skip("SGLang is not installed: run make setup-sglang")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


def make_model(name: str, folder: Path) -> Path:
    path = folder / name
    command = [str(VENV / "bin/python"), str(ROOT / "tests/vllm/models.py"), name, str(path)]
    assert subprocess.run(command, env=environment(), timeout=MODELS_S_MAX, check=False).returncode == 0
    return path


@pytest.fixture(scope="session")
def llama(folder: Path) -> Path:
    return make_model("llama", folder)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """One of each length, and the same with more tokens."""
    chance = random.Random(1)
    short = [[chance.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    return short + [[*prompt, *(chance.randrange(3, 1000) for _ in range(EXTRA))] for prompt in short]


@pytest.fixture(scope="session")
def servers(folder: Path, llama: Path) -> Iterator[dict[str, SglangServer]]:
    started = {
        f"{mode} {layout}": SglangServer(layout, llama, folder, mode=mode)
        for mode in ("prefill", "decode")
        for layout in ("tp1", "tp2")
    }
    started["plain"] = SglangServer("tp1", llama, folder)
    with running(*started.values()):
        yield started


@pytest.fixture(scope="session")
def alike() -> list[list[int]]:
    """Prompts of which four begin alike; several of them fit into one forward."""
    chance = random.Random(2)
    begins = [[chance.randrange(3, 1000) for _ in range(60)] for _ in range(6)]
    return [
        [*begin, *(chance.randrange(3, 1000) for _ in range(3 + n))] for begin in begins for n in range(4)
    ]


@pytest.fixture(scope="session")
def plain_answers(
    servers: dict[str, SglangServer], prompts: list[list[int]], alike: list[list[int]]
) -> list[Any]:
    return ask_plain(servers["plain"], prompts + alike)


@pytest.fixture(scope="session")
def answers(plain_answers: list[Any], prompts: list[list[int]]) -> list[Any]:
    return plain_answers[: len(prompts)]


def ask_plain(plain: SglangServer, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities of one server without a hand-over, which ends then."""

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        return await asyncio.gather(*(plain.generate(session, prompt, NUM_TOKENS) for prompt in prompts))

    found = run_client(ask_all)
    plain.stop()
    assert {status for status, _ in found} == {200}
    return [answer for _, answer in found]
