"""Servers that all tests of this folder share; they start once, at the same time."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.servers import VENV, Server, run, running

NUM_TOKENS = 12
LENGTHS = (
    *(1, 2, 5, 17, 90, 127, 128, 129, 130, 200, 255, 256),
    *(257, 300, 384, 385, 511, 640, 768, 900, 1024, 1200, 1400, 1600),
)
EXTRA = 150
"""Tokens that a prompt is extended by, so that all before is a prefix hit."""
MODELS_S_MAX = 600.0


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_installed() -> None:
    if not (VENV / "bin/vllm").exists():
        pytest.skip("vLLM is not installed: run make setup-vllm")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def llama(folder: Path) -> Path:
    path = folder / "llama"
    assert run("models.py", "llama", str(path)).wait(MODELS_S_MAX) == 0
    return path


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """One of each length, and the same with more tokens."""
    chance = random.Random(1)
    short = [[chance.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    return short + [[*prompt, *(chance.randrange(3, 1000) for _ in range(EXTRA))] for prompt in short]


@pytest.fixture(scope="session")
def plain(folder: Path, llama: Path, prompts: list[list[int]]) -> subprocess.Popen[bytes]:
    """vLLM without a connector, at work on the answers."""
    (folder / "prompts.json").write_text(json.dumps(prompts))
    files = [str(folder / name) for name in ("prompts.json", "answers.json")]
    return run("plain.py", str(llama), str(NUM_TOKENS), *files)


@pytest.fixture(scope="session")
def servers(folder: Path, llama: Path, plain: subprocess.Popen[bytes]) -> Iterator[dict[str, Server]]:
    started = {layout: Server(layout, llama, folder) for layout in ("tp1", "tp2", "pp2")}
    # The others fail requests whose hand-over failed, which is vLLM's default.
    started["tp2"].transfer["kv_load_failure_policy"] = "recompute"
    with running(*started.values()):
        yield started


@pytest.fixture(scope="session")
def answers(folder: Path, plain: subprocess.Popen[bytes], servers: dict[str, Server]) -> list[list[int]]:
    """What plain vLLM answers to each prompt."""
    assert plain.wait(MODELS_S_MAX) == 0
    found: list[list[int]] = json.loads((folder / "answers.json").read_text())
    return found
