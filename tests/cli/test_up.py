"""`baton up` refuses what cannot work before it starts anything."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest
from tests.cli.commands import problems
from tests.cli.models import speaking_model

from baton.cli import main, start
from baton.cli.deployment import (
    health_stage,
    is_log,
    make_instances,
    plan_instances,
    plan_pairs,
    router_service,
)
from baton.cli.options import DeploymentOptions
from baton.cli.parser import parse
from baton.cli.start import curl_command
from baton.engine import sizes
from baton.engine.gpu_memory import GpuMemory
from baton.plan.storage import FUSED, HND
from baton.supervisor import Service, SupervisedService


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def up(capfd, monkeypatch, model):
    def started(*_: object) -> None:
        raise AssertionError("something was started")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        monkeypatch.setattr(start, "DeploymentProcesses", started)
        monkeypatch.setattr(sys, "argv", ["baton", "up", "--model", str(model), "--port", "0", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return run


def read(*words: str) -> DeploymentOptions:
    """The options of `baton up` as typed."""
    return parse(DeploymentOptions, words)


def instance_services(options: DeploymentOptions) -> list[Service]:
    return [instance.service("http://127.0.0.1:8400", []) for instance in make_instances(options)]


MISUSES = {
    "no layout": (["--prefill", "xp2"], "xp2"),
    "an empty layout": (["--prefill", "tp1,,tp2"], "empty layout"),
    "one of several layouts": (["--prefill", "tp1", "--decode", "tp2,pp9"], "pp9"),
    "heads that tp does not divide": (
        ["--prefill", "tp1,tp2", "--decode", "tp1,tp5"],
        "layout tp5: the model has 2 KV heads",
    ),
    "no settings of a policy": (
        ["--prefill", "tp1", "--overlap", "adaptive:min_token=3"],
        "set min_tokens, max_iters, min_iters, saturation once each",
    ),
    "no time for a transfer": (["--prefill", "tp1", "--transfer-timeout", "0"], "total_s is 0.0"),
    "no policy": (["--prefill", "tp1", "--overlap", "wild"], "wild"),
    "no way to route": (["--prefill", "tp1", "--policy", "by_colour"], "round_robin"),
    "no speed": (["--prefill", "tp1", "--decode", "tp1", "--link", "fast"], "12.5GB/s"),
    "no side": (["--prefill", "tp1", "--decode", "tp1", "--first-token", "router"], "'prefill', 'decode'"),
    "no transport": (["--prefill", "tp1", "--transport", "pigeon"], "shm"),
    "no dtype": (["--prefill", "tp1", "--dtype", "fp4"], "bf16"),
    "no option of serve": (["--prefill", "tp1", "--prefill-args", "--colour red"], "--colour"),
    "no value for a side": (
        ["--prefill", "tp1", "--decode", "tp1", "--decode-args", "--page-tokens none"],
        "--decode-args: Invalid value for '--page-tokens'",
    ),
    "an option for all": (
        ["--prefill", "tp1", "--decode", "tp1", "--decode-args", "--port 1"],
        "--decode-args: --port cannot be set for one side",
    ),
    "no KV cache dtype": (
        ["--prefill", "tp1", "--decode", "tp1", "--decode-args", "--kv-cache-dtype fp8_e5m2"],
        "--kv-cache-dtype 'fp8_e5m2'",
    ),
    "no storage order": (["--prefill", "tp1", "--prefill-args", "--kv-layout nhd"], "hnd.fused or hnd.apart"),
    "options without a side": (["--prefill", "tp1", "--decode-args", "--verify"], "give --decode too"),
    "two transports": (
        ["--prefill", "tp1", "--decode", "tp1", "--decode-args", "--transport tcp"],
        "transports shm and tcp cannot reach each other",
    ),
    "a GPU for all": (["--prefill", "tp1", "--base-gpu-id", "1"], "--base-gpu-id is for one side"),
    "an open quote": (["--prefill", "tp1", "--prefill-args", "'--verify"], "No closing quotation"),
    "no draft": (["--prefill", "tp1", "--draft"], "there is no draft layer"),
    "no model": (["--prefill", "tp1", "--model", "no/such/model"], "no/such/model"),
    "the world may ask": (["--prefill", "tp1", "--host", "0.0.0.0"], "--api-key-file"),
    "no keys": (["--prefill", "tp1", "--api-key-file", "no/such/file"], "no/such/file"),
    "no port": (["--prefill", "tp1", "--port", "70000"], "65535"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_one_line_before_anything_starts(up, name: str) -> None:
    words, said = MISUSES[name]
    code, out, err = up(*words)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_a_failure_before_weights_are_loaded(up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = up("--prefill", "tp1", "--port", str(port))
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err.splitlines()[-1]
    assert "--port" in err.splitlines()[-1]


def test_every_pair_is_planned(model) -> None:
    options = read("--model", str(model), "--prefill", "tp1,pp2", "--decode", "tp2,tp1")
    lines = plan_pairs(plan_instances(options))
    starts = [line.partition(", none packed; ")[0] for line in lines]
    assert starts == [
        "prefill-0 (tp1) to decode-0 (tp2): 4 routes between 2 pairs of ranks",
        "prefill-0 (tp1) to decode-1 (tp1): 2 routes between 1 pairs of ranks",
        "prefill-1 (pp2) to decode-0 (tp2): 8 routes between 4 pairs of ranks",
        "prefill-1 (pp2) to decode-1 (tp1): 4 routes between 2 pairs of ranks",
    ]


def test_sides_that_differ_are_planned_as_they_are(model) -> None:
    options = read(
        *("--model", str(model), "--prefill", "tp2", "--decode", "tp1", "--page-tokens", "32", "--verify"),
        *("--prefill-args", "--kv-cache-dtype fp16 --link 5MB/s"),
        *("--decode-args", "--page-tokens 64 --kv-layout hnd.apart --packing cost"),
    )
    source, target = plan_instances(options)
    assert (source.sizes.spec.storage.page_tokens, target.sizes.spec.storage.page_tokens) == (32, 64)
    assert (source.sizes.spec.storage.dtype, target.sizes.spec.storage.dtype) == ("fp16", "fp32")
    assert (source.sizes.spec.storage.order, target.sizes.spec.storage.order) == (FUSED, HND)
    assert (source.config.packing, target.config.packing) == ("convert", "cost")
    assert (source.config.is_verified, target.config.is_verified) == (True, True)
    assert source.config.link_bytes_per_s == 5e6
    (line,) = plan_pairs([source, target])
    assert "packed for 2 of them, converted from fp16 to fp32; " in line
    prefill, decode = (" ".join(service.arguments) for service in instance_services(options))
    assert all(words in prefill for words in ("--page-tokens 32", "--link 5MB/s", "--kv-cache-dtype fp16"))
    assert all(words in decode for words in ("--page-tokens 64", "--packing cost", "--kv-layout hnd.apart"))
    assert "--verify" in prefill
    assert "--link" not in decode


def test_the_command_lines_of_the_services() -> None:
    options = read(
        *("--model", "demo", "--prefill", "pp2,tp1", "--decode", "tp3", "--link", "5MB/s", "--port", "81"),
        *("--policy", "round_robin", "--max-num-batched-tokens", "64"),
    )
    first, second, third = instance_services(options)
    assert [service.name for service in (first, second, third)] == ["prefill-0", "prefill-1", "decode-0"]
    assert first.arguments[:5] == ("serve", "--role", "prefill", "--layout", "pp2")
    assert " ".join(first.arguments).endswith("--link 5MB/s --chunk-tokens 64 --model demo"), "as given"
    assert all("--chunk-tokens" in service.arguments for service in (first, second, third))
    assert "--link" in second.arguments
    assert "--link" not in third.arguments, "links are of prefill ranks"
    supervised = SupervisedService(first)
    assert supervised.command()[-2:] == ["--port", "0"]
    assert supervised.on_line("serving at http://127.0.0.1:4321")
    assert supervised.command()[-2:] == ["--port", "4321"], "restarted on the port that it had"
    router = SupervisedService(router_service(options, "http://127.0.0.1:8400"))
    assert router.command()[-2:] == ["--port", "81"]
    (alone,) = instance_services(read("--model", "demo", "--prefill", "pp2"))
    assert alone.name == "both-0"
    assert alone.arguments[:3] == ("serve", "--role", "both")


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("--decode tp1 --device cpu", None),
        ("--decode tp1 --device cuda", "cuda_ipc"),
        ("--decode tp1 --device cuda --transport shm", "shm"),
        ("--decode tp1 --device cuda --link 25GB/s", None),
        ("--decode tp1 --device cuda --prefill-args '--link 25GB/s'", None),
        ("--decode tp1 --device cuda --decode-args '--device cpu'", None),
        ("--decode tp1 --device cuda --decode-args '--transport shm'", None),
        ("--device cuda", None),
    ],
)
def test_gpus_of_one_host_copy_to_each_other(line: str, transport: str | None) -> None:
    options = read("--model", "demo", "--prefill", "tp1", *shlex.split(line))
    first, *_ = instance_services(options)
    named = [first.arguments[i + 1] for i, word in enumerate(first.arguments) if word == "--transport"]
    assert named == ([transport] if transport else [])


def test_instances_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "read_gpus", lambda: [GpuMemory("0", 24 << 30, 24 << 30)])
    line = [
        "--model",
        "demo",
        "--prefill",
        "tp1",
        "--decode",
        "tp1",
        "--device",
        "cuda",
        "--gpu-memory-utilization",
        "0.8",
    ]
    assert shares(*line) == [("0", "0.4"), ("0", "0.4")]
    own = shares(*line, "--decode-args", "--gpu-memory-utilization 0.3 --base-gpu-id 1")
    assert own == [("0", "0.4"), ("1", "0.3")], "a side's own options go first"


def shares(*line: str) -> list[tuple[str, str]]:
    """First GPU and share of every instance."""
    names = ("--base-gpu-id", "--gpu-memory-utilization")
    lines = [service.arguments for service in instance_services(read(*line))]
    return [tuple(words[words.index(name) + 1] for name in names) for words in lines]


def test_options_reach_the_process_that_they_are_for() -> None:
    options = read(
        *("--model", "demo", "--prefill", "tp1", "--decode", "tp1", "--max-model-len", "99"),
        *("--max-num-seqs", "3", "--no-prefix-caching", "--served-model-name", "smol"),
        *("--transfer-timeout", "7.5", "--queue-timeout", "9", "--no-endpoint-process"),
        *("--local-prefill-max", "0", "--log-level", "debug", "--log-format", "json"),
    )
    for service in instance_services(options):
        line = " ".join(service.arguments)
        for words in ("--max-model-len 99", "--max-num-seqs 3", "--no-prefix-caching", "--queue-timeout 9.0"):
            assert words in line
        for words in ("--served-model-name smol", "--transfer-timeout 7.5", "--no-endpoint-process"):
            assert words in line
        assert list(problems(list(service.arguments))) == []
    router = router_service(options, "http://127.0.0.1:8400").arguments
    assert "--local-prefill-max 0 --queue-timeout 9.0" in " ".join(router)
    assert router[-4:] == ("--log-level", "debug", "--log-format", "json")
    assert list(problems(list(router))) == []
    assert '"model": "smol"' in curl_command("http://127.0.0.1:8000", options)


def test_the_sizes_are_planned_with_the_options_of_each_side(model) -> None:
    options = read(
        *("--model", str(model), "--prefill", "tp1", "--decode", "tp1", "--max-model-len", "64"),
        *("--max-num-seqs", "3", "--no-prefix-caching"),
        *("--decode-args", "--context 48 --transfer-timeout 9 --overlap adaptive:min_tokens=64"),
    )
    prefill, decode = plan_instances(options)
    assert (prefill.sizes.context_max, decode.sizes.context_max) == (64, 48)
    assert (prefill.config.sequences_max, prefill.config.has_prefix_cache) == (3, False)
    assert (prefill.config.total_s, decode.config.total_s) == (600.0, 9.0)
    assert decode.config.policy == "adaptive:min_tokens=64"


def test_health_in_words() -> None:
    body = b'{"error": {"message": "prefill-0 is not ready: loading weights", "code": "LOADING"}}'
    assert health_stage("prefill-0", body) == "loading weights"
    assert health_stage("router", b'{"error": {"message": "no instance"}}') == "no instance"
    for strange in (b"", b"<html>", b"[]", b'{"error": 1}'):
        assert health_stage("x", strange) == "not ready"
    assert is_log("2026-11-15 13:54:39,984 baton.server: running")
    assert not is_log("baton: no such file")
