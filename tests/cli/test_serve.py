"""`baton serve`: what its options become, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.engine.tiny import tiny

from baton.cli import main
from baton.engine.config import EngineConfig
from baton.fork_server import FORK_SERVERS
from baton.serving import server
from baton.serving.server import ServerConfig


def configured(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServerConfig:
    """What a command line asks for; nothing is started."""
    configs: list[ServerConfig] = []

    async def run(config: ServerConfig, say: Callable[[str], None]) -> None:
        configs.append(config)

    def fork(environment: Any, modules: Any) -> None: ...

    monkeypatch.setattr(server, "serve", run)
    monkeypatch.setattr(FORK_SERVERS, "fork_early", fork)
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "--model", "demo", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    (config,) = configs
    return config


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(
        monkeypatch,
        *("--max-num-seqs", "3", "--no-prefix-caching", "--served-model-name", "smol"),
        *("--device", "cpu", "--generation-config", "none"),
        *("--max-model-len", "99", "--transfer-timeout", "7.5", "--overlap", "adaptive:min_tokens=64"),
        *("--state-slots", "5", "--num-reserved-decode-tokens", "0"),
    )
    instance = config.instance
    assert (instance.sequences_max, instance.has_prefix_cache, instance.context_max) == (3, False, 99)
    assert (instance.device, instance.generation_config) == ("cpu", "none")
    assert (instance.total_s, instance.timings().total_s) == (7.5, 7.5)
    assert (instance.policy, config.served_model_name) == ("adaptive:min_tokens=64", "smol")
    assert (instance.state_slots, instance.growth_tokens) == (5, 0)
    default = configured(monkeypatch, "--context", "98").instance
    assert (default.device, default.generation_config) == ("auto", "auto")
    assert (default.sequences_max, default.has_prefix_cache, default.context_max) == (64, True, 98)


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ("", "tp1"),
        ("-tp 2", "tp2"),
        ("-dp 2 --pipeline-parallel-size 3 -tp 3", "dp2.pp3.tp3"),
        ("--tensor-parallel-size 1 --data-parallel-size 2", "dp2"),
        ("--layout pp2.tp2", "pp2.tp2"),
    ],
)
def test_sizes_make_a_layout(monkeypatch: pytest.MonkeyPatch, words: str, layout: str) -> None:
    assert configured(monkeypatch, *words.split()).instance.layout == layout


def test_options_go_by_the_names_of_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = configured(monkeypatch, "--block-size", "32", "--max-num-batched-tokens", "77").instance
    assert (instance.page_tokens, instance.chunk_tokens) == (32, 77)


def test_a_layout_and_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "--model", "demo", "--layout", "tp3", "-tp", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "give either --layout (tp3) or -tp, -pp and -dp (tp2), not both" in capsys.readouterr().err


def test_the_model_goes_by_its_served_name() -> None:
    request: Any = None

    async def ask() -> list[Any]:
        config = ServerConfig(EngineConfig("/srv/models/llama"), served_model_name="llama-8b")
        asked = server.Server(config)
        return [await asked._get_models(request), await asked._get_server_info(request)]

    models, info = (msgspec.json.decode(answer.body) for answer in asyncio.run(ask()))
    assert [(card["id"], card["root"]) for card in models["data"]] == [("llama-8b", "/srv/models/llama")]
    assert (info["model"], info["model_path"]) == ("llama-8b", "/srv/models/llama")


@pytest.mark.slow
def test_a_silence_of_less_than_some_beats_is_refused() -> None:
    words = [sys.executable, "-m", "baton", "serve", "--model", str(tiny("llama")), "--port", "0"]
    done = subprocess.run(
        [*words, "--silence-s", "0.5"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done
    assert "silence_s is 0.5; give at least 1 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
