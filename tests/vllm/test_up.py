"""`baton up --engine vllm` with real vLLM: one command, right tokens, and nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.faults.stages import is_alive
from tests.serve.parts import ask, children, until
from tests.vllm.conftest import LENGTHS, NUM_TOKENS
from tests.vllm.servers import START_S_MAX, VENV, environment

pytestmark = pytest.mark.vllm
END_S_MAX = 240.0
WORDS = (
    *(
        "--engine",
        "vllm",
        "--prefill",
        "tp1",
        "--decode",
        "tp1",
        "--port",
        "0",
        "--vllm",
        str(VENV / "bin/vllm"),
    ),
    *("--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def test_one_command_serves_and_leaves_nothing(
    tmp_path: Path, llama: Path, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    temporary = Path(tempfile.mkdtemp())
    env = environment() | {"TMPDIR": str(temporary)}
    env.pop("BATON_SECRET")
    command = [sys.executable, "-m", "baton", "up", "--model", str(llama), *WORDS]
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)

    def serving() -> re.Match[str] | None:
        assert process.poll() is None, err.read_text()
        return re.search(r"^serving .* at (http\S+)$", out.read_text(), re.MULTILINE)

    try:
        url = str(until(serving, err.read_text, START_S_MAX, 0.5)[1])
        started = descendants(process.pid)
        asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        place = LENGTHS.index(900)

        def is_handed_over() -> Any:
            """On a busy machine a server may answer a poll late, and the other one answers alone."""
            body = asked | {"prompt": prompts[place], "return_token_ids": True}
            answer = ask(url, "/v1/completions", body, wait_s=END_S_MAX)
            assert answer.status in (200, 503), answer.text
            if answer.status == 200:
                assert answer.json["choices"][0]["token_ids"] == answers[place]
            figures = ask(url, "/metrics").text
            return re.search(r"^baton_router_handoffs_total{.*} [1-9]", figures, re.MULTILINE)

        until(is_handed_over, err.read_text, END_S_MAX)
        process.terminate()
        assert process.wait(END_S_MAX) == 0, err.read_text()
        until(lambda: not any(map(is_alive, started)), "all processes have ended", END_S_MAX)
        assert len(started) >= 5, "a router, and two servers with an engine each"
        assert list(temporary.iterdir()) == []
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(END_S_MAX)
        shutil.rmtree(temporary)
