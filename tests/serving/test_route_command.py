"""`baton route` as a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner
from tests.session.registry_world import SECRET

from baton.cli import make_app
from baton.errors import ConfigError

REGISTRY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "API key"),
        (["--local", "never", "--local-prefill-max", "9"], "no effect with --local never"),
        (["--secret-file", "/nowhere"], "secret file /nowhere"),
    ],
)
def test_misuse_is_refused_before_anything_listens(options: list[str], told: str, monkeypatch):
    monkeypatch.setenv("BATON_SECRET", SECRET.decode())
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    done = CliRunner().invoke(make_app("route"), ["route", "--registry", REGISTRY, "--port", "0", *options])
    assert isinstance(done.exception, ConfigError)
    assert told in str(done.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --registry URL"),
        (["--decode", "http://h:1"], "give --engine vllm too"),
        (["--engine", "vllm", "--decode", "http://h:1"], "a --prefill and a --decode"),
        (["--engine", "vllm", "--prefill", "http://h:1", "--decode", "http://h:2"], "source=HOST:KV_PORT"),
        (["--engine", "vllm", "--registry", REGISTRY, "--first-token", "decode"], "leave it out"),
    ],
)
def test_instances_that_are_not_named_well_are_refused(options: list[str], told: str, monkeypatch):
    monkeypatch.setenv("BATON_SECRET", SECRET.decode())
    done = CliRunner().invoke(make_app("route"), ["route", "--port", "0", *options])
    assert isinstance(done.exception, ConfigError)
    assert told in str(done.exception)


def test_router_runs_without_a_registry_and_ends_when_told():
    words = [sys.executable, "-m", "baton", "route", "--registry", REGISTRY, "--port", "0"]
    environment = {**os.environ, "BATON_SECRET": SECRET.decode(), "BATON_API_KEY": "a-key-of-a-client"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("routing at http://127.0.0.1:")
        url = line.rpartition(" ")[2]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/health", timeout=300)
        assert refused.value.code == 503
        assert b"the registry has not answered yet" in refused.value.read()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/server_info", timeout=300)
        assert refused.value.code == 401
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, "")
        assert time.monotonic() - began_s < 30
        assert SECRET.decode() not in errors
    finally:
        process.kill()
        process.wait()
