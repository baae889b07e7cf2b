"""Options of the connector, and the check of vLLM's version."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.adapters.common import ConnectorConfig
from baton.adapters.vllm import check_version
from baton.errors import ConfigError


@pytest.mark.parametrize("version", ["0.31.0", "0.32", "0.32.0", "0.32.1+cpu"])
def test_known_versions_pass(monkeypatch: Any, version: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    check_version()


@pytest.mark.parametrize("version", ["0.30.9", "0.320.0", "1.0"])
def test_other_versions_are_refused_by_name(monkeypatch: Any, version: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(ConfigError, match=rf"vLLM {version}: .* 0\.31, 0\.32"):
        _ = importlib.import_module("baton.adapters.vllm").BatonConnector


def test_without_vllm_it_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="install vLLM"):
        check_version()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"hosts": "a"}, "no 'hosts'.*knows host, port"),
        ({"port": "9001"}, "port is '9001'; give a whole number"),
        ({"port": True}, "port is True"),
        ({"verify": 1}, "verify is 1; give true or false"),
        ({"port": -5}, "port is -5; give 0 to 65535"),
        ({"port": 70000}, "port is 70000; give 0 to 65535"),
        ({"host": ""}, "host is ''; give the address that peers reach this machine by"),
        ({"host": "0.0.0.0"}, "host is '0.0.0.0'; give the address"),
        ({"ungranted_share_max": 2.0}, r"ungranted_share_max is 2.0; give a share above 0, up to 1"),
        ({"ungranted_share_max": 0}, "ungranted_share_max is 0;"),
        ({"offer_s": -1}, "offer_s is -1; give a finite number of seconds above 0"),
        ({"offer_s": 0}, "offer_s is 0; give"),
        ({"progress_s": float("inf")}, "progress_s is inf; give"),
        ({"total_s": 0}, "total_s is 0; give"),
        ({"silence_s": 0}, "silence_s is 0; give"),
        ({"silence_s": float("nan")}, "silence_s is nan; give"),
        ({"overlap": "fixed"}, "fixed needs its layers"),
        ({"overlap": "cost"}, "use fixed:N or adaptive"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ConnectorConfig.parse(options)


@pytest.mark.parametrize(
    ("options", "kv_role", "port"),
    [
        ({}, "kv_producer", 9003),
        ({}, "kv_both", 9003),
        ({}, "kv_consumer", 0),
        ({"port": 7000}, "kv_consumer", 7003),
        ({"port": 0}, "kv_producer", 0),
    ],
)
def test_engines_of_a_data_parallel_server_have_ports_of_their_own(
    options: dict[str, Any], kv_role: str, port: int
) -> None:
    config = ConnectorConfig.parse(options)
    assert config.sockets(kv_role, kv_port=9000, dp=3).port == port


def test_a_port_beyond_the_last_one_is_refused_with_its_rank() -> None:
    config = ConnectorConfig.parse({"port": 65535})
    assert config.sockets("kv_producer", kv_port=9000, dp=0).port == 65535
    with pytest.raises(ConfigError, match=r"port 65538 of data-parallel rank 3: .* at most 65532"):
        config.sockets("kv_producer", kv_port=9000, dp=3)


def test_a_trace_needs_its_folder(tmp_path: Path) -> None:
    assert ConnectorConfig.parse({}).trace_file("i", 1) is None
    config = ConnectorConfig.parse({"trace": str(tmp_path)})
    assert config.trace_file("i", 1) == tmp_path / "i.rank1.jsonl"
    with pytest.raises(ConfigError, match="is not a folder"):
        ConnectorConfig.parse({"trace": str(tmp_path / "none")}).trace_file("i", 1)
