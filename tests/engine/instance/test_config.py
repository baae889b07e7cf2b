"""What cannot work is refused before a process is started, by whoever starts it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.tiny import tiny

from baton.engine.deployment import Deployment
from baton.engine.instance.config import InstanceConfig, derive
from baton.errors import ConfigError, LayoutError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"transport": "pigeon"}, "transport 'pigeon' is not known"),
    ({"transport": "tcp:streams"}, "streams"),
    ({"device": "tpu"}, "device 'tpu'"),
    ({"role": "spectator"}, "role 'spectator'"),
    ({"port": 70000}, "port 70000"),
    ({"host": "0.0.0.0"}, "host '0.0.0.0'"),
    ({"url": "ftp://one:80"}, "url must be .* found 'ftp://one:80'"),
    ({"url": "http://one:80 two"}, "url must be"),
    ({"url": "http://one:99999"}, "url must be"),
    ({"url": "http://user:word@one"}, "url must be"),
    ({"name": "two words", "registry": "http://127.0.0.1:1"}, "instance must be .* 'two words'"),
    ({"registry": "127.0.0.1:8400"}, "registry '127.0.0.1:8400' is not an address"),
    ({"registry": "http://[::1"}, "is not an address"),
    ({"queue_max": -1}, "queue_max is -1"),
    ({"silence_s": 0.5}, "silence_s is 0.5; give at least 1 s"),
    ({"silence_s": math.nan}, "silence_s is nan"),
    ({"silence_s": math.inf}, "silence_s is inf"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[words[:24] for _, words in BAD])
def test_refused_before_the_start(options: dict[str, Any], words: str) -> None:
    config = InstanceConfig(str(tiny("llama")), **options)
    with pytest.raises(ConfigError, match=words):
        derive(config)


def test_a_tp_that_cannot_cut_the_heads() -> None:
    with pytest.raises(LayoutError, match="tp"):
        derive(InstanceConfig(str(tiny("llama")), "tp5"))


def test_a_deployment_refuses_the_same() -> None:
    bad = InstanceConfig(str(tiny("llama")), transport="pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        Deployment(replace(bad, transport="shm"), bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        derive(InstanceConfig(str(tiny("llama")), device="cuda"))


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:8000", "https://host.name/base", "http://[::1]:80/"])
def test_taken(url: str) -> None:
    config = InstanceConfig(str(tiny("llama")), url=url, port=65535, queue_max=3, name="two words")
    assert derive(config).layout.num_ranks == 1
