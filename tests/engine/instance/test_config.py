"""What cannot work is refused before a process is started, by whoever starts it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.hybrids import hybrid
from tests.engine.tiny import WINDOW, WINDOWED, tiny, windowed

from baton.checkpoint.names import DUMMY
from baton.engine.config import EngineConfig, check_config
from baton.engine.deployment import Deployment
from baton.engine.pages import engine_storage
from baton.engine.sizes import check_machine, derive_sizes
from baton.errors import ConfigError, LayoutError
from baton.plan import Cache
from baton.plan.ownership import buffers
from baton.plan.storage import FUSED, HND

GROUP = f"tokens.w{WINDOW}"
REASON = "prefixes are not kept: pages before a window are freed, so no whole prefix remains"

BAD: list[tuple[dict[str, Any], str]] = [
    ({"transport": "pigeon"}, "transport 'pigeon' is not known"),
    ({"transport": "tcp:streams"}, "streams"),
    ({"device": "tpu"}, "device 'tpu' is not known; use auto, cpu or cuda"),
    ({"growth_tokens": -1}, "growth_tokens is -1; give a count from 0"),
    ({"generation_config": "vllm"}, "generation_config 'vllm' is not known; use auto or none"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv-cache-dtype 'fp8_e5m2' .* use auto .*float32 or fp8"),
    ({"dtype": "fp8"}, r"dtype 'fp8' is not supported; use auto, bfloat16 \(bf16\), float16 \(fp16\)"),
    ({"kv_layout": "nhd.fused"}, "kv_layout 'nhd.fused' is not known; use hnd.fused or hnd.apart"),
    ({"staging_mb": -1}, "staging_mb is -1"),
    ({"packing": "always"}, "packing 'always' is not known; use convert or cost"),
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
    ({"progress_s": 0.0}, "progress_s is 0.0; give a finite number of seconds above 0"),
    ({"progress_s": math.inf}, "progress_s is inf"),
    ({"ungranted_share_max": 0.0}, "ungranted_share_max is 0.0; give a share in "),
    ({"ungranted_share_max": 1.5}, "ungranted_share_max is 1.5"),
    ({"silence_s": math.inf}, "silence_s is inf"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[words[:24] for _, words in BAD])
def test_refused_before_the_start(options: dict[str, Any], words: str) -> None:
    config = EngineConfig(str(tiny("llama")), **options)
    with pytest.raises(ConfigError, match=words):
        derive_sizes(config)


@pytest.mark.parametrize(("text", "words"), [('{"top_p": 7}', "top_p is 7.0"), ("{", "is not JSON")])
def test_sampling_defaults_are_checked_with_the_settings(tmp_path: Path, text: str, words: str) -> None:
    """By then nothing listens, and torch is not imported."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_config(EngineConfig(str(tmp_path)))
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    check_config(EngineConfig(str(tmp_path), generation_config="none"))


def test_a_tp_that_cannot_cut_the_heads() -> None:
    with pytest.raises(
        LayoutError, match="layout tp5: the model has 2 KV heads; use tp up to 2, or a multiple"
    ):
        derive_sizes(EngineConfig(str(tiny("llama")), "tp5"))


def test_a_deployment_refuses_the_same() -> None:
    bad = EngineConfig(str(tiny("llama")), transport="pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        Deployment(replace(bad, transport="shm"), bad)


def test_rows_of_different_sizes_cannot_be_fused() -> None:
    k, v = derive_sizes(EngineConfig(str(tiny("llama")))).cache.components
    narrow = replace(v, dims=(replace(v.dims[0], size=4),))
    cache = Cache(5, (k, narrow))
    with pytest.raises(ConfigError, match=r"cannot be fused; use hnd\.apart"):
        engine_storage(cache, 16, "fp32", "hnd.fused")
    assert engine_storage(cache, 16, "fp32").order == HND
    assert engine_storage(Cache(5, (k, v)), 16, "fp32").order == FUSED


def test_staging_holds_what_the_pages_do() -> None:
    model = str(tiny("llama"))
    wide = derive_sizes(EngineConfig(model, pool_tokens=1024))
    assert wide.staging_bytes == sum(buffers(wide.spec, 0, "this").values())
    narrow = derive_sizes(EngineConfig(model, pool_tokens=1024, kv_cache_dtype="bf16"))
    assert narrow.staging_bytes == wide.staging_bytes == 2 * sum(buffers(narrow.spec, 0, "this").values())
    assert derive_sizes(EngineConfig(model, staging_mb=3)).staging_bytes == 3 << 20


def test_a_context_that_is_asked_for_is_given_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.sizes.POOL_BYTES_DEFAULT", 1)
    model = str(tiny("llama"))
    assert derive_sizes(EngineConfig(model)).context_max == 1024
    asked = derive_sizes(EngineConfig(model, context_max=3000))
    assert asked.context_max == 3000
    assert asked.num_pages["tokens"] * 16 >= 2 * 3000
    assert derive_sizes(EngineConfig(model, context_max=300, pool_tokens=300)).context_max == 300
    with pytest.raises(ConfigError, match="a context of 3000 tokens does not fit into a KV cache of 2999"):
        derive_sizes(EngineConfig(model, context_max=3000, pool_tokens=2999))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        derive_sizes(EngineConfig(str(tiny("llama")), device="cuda"))


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_a_library_that_is_not_installed_is_missed_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(tiny("llama")), transport=name)
    monkeypatch.setattr(f"baton.transport.{name}.LIBRARY", ("json.decoder",))
    check_config(config)
    monkeypatch.setattr(f"baton.transport.{name}.LIBRARY", ("no_such_library.engine",))
    with pytest.raises(ConfigError, match=r"no_such_library\.engine is not installed"):
        check_config(config)


def test_cuda_ipc_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="cuda_ipc moves CUDA memory; use shm with device 'cpu'"):
        derive_sizes(EngineConfig(str(tiny("llama")), transport="cuda_ipc"))


@pytest.mark.parametrize("name", ["tcp", "nixl"])
def test_transports_of_host_memory_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.transport.nixl.LIBRARY", ("json.decoder",))
    config = EngineConfig(str(tiny("llama")), transport=name, device="cuda")
    with pytest.raises(ConfigError, match=f"transport {name} does not move CUDA memory; use shm or cuda_ipc"):
        check_config(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=f"transport {name} does not move CUDA memory"):
        check_machine(replace(config, device="auto"))
    check_config(replace(config, transport="shm"))


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:8000", "https://host.name/base", "http://[::1]:80/"])
def test_taken(url: str) -> None:
    config = EngineConfig(str(tiny("llama")), url=url, port=65535, queue_max=3, name="two words")
    assert derive_sizes(config).layout.num_ranks == 1


@pytest.mark.parametrize("family", WINDOWED)
def test_windowed_models_have_their_own_pages_and_say_that_prefixes_are_not_kept(
    family: str, tmp_path: Path
) -> None:
    sizes = derive_sizes(EngineConfig(str(windowed(family, tmp_path)), pool_tokens=1024, page_tokens=16))
    groups = {GROUP} if family == "mistral" else {"tokens", GROUP}
    assert dict(sizes.num_pages) == dict.fromkeys(groups, 64)
    assert sizes.lines()[-1] == REASON
    # The window is no limit of the context.
    assert sizes.context_max == 1024 > WINDOW


def test_an_index_shares_the_pages_of_its_latent_and_prefixes_are_kept(tmp_path: Path) -> None:
    sizes = derive_sizes(EngineConfig(str(tiny("deepseek_v32", tmp_path)), pool_tokens=1024))
    assert list(sizes.num_pages) == ["tokens"]
    assert {component.name for component in sizes.cache.components} == {"latent", "index_k"}
    assert not any("prefixes" in line for line in sizes.lines())


def test_slots_of_recurrent_state() -> None:
    """Small states: a step has no more sequences than there are slots."""

    def num_slots(**options: int) -> int:
        return derive_sizes(EngineConfig(str(hybrid("bamba")), pool_tokens=1024, **options)).num_pages[
            "state"
        ]

    assert num_slots() == num_slots(sequences_max=8) == 64
    assert num_slots(sequences_max=100) == 100
    assert num_slots(sequences_max=100, state_slots=3) == 3


def test_gpus_hand_off_beside_the_worker() -> None:
    """Unless the transport needs the memory to be its own process's."""
    assert EngineConfig("demo", device="cuda").is_offloaded
    assert EngineConfig("demo", device="cuda", transport="tcp:host=127.0.0.1").is_offloaded
    assert not EngineConfig("demo", device="cuda", transport="cuda_ipc").is_offloaded
    assert not EngineConfig("demo").is_offloaded


@pytest.mark.parametrize(("device", "transport"), [("cpu", "memory"), ("cuda", "cuda_ipc")])
def test_transports_that_cannot_run_beside_the_worker(device: str, transport: str) -> None:
    config = EngineConfig(str(tiny("llama")), device=device, transport=transport, has_endpoint_process=True)
    with pytest.raises(ConfigError, match=f"transport {transport} cannot run in a process beside the worker"):
        check_config(config)


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "torch.float16"}, "fp16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"dtype": "float8_e4m3fn"}, "fp32"),
        ({}, "fp32"),
        ([], "fp32"),
    ],
)
def test_auto_is_what_the_checkpoint_states(tmp_path: Path, stated: object, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = EngineConfig(str(tmp_path))
    assert (config.dtype, config.cache_dtype) == (dtype, dtype)
    assert EngineConfig(f"{DUMMY}{tmp_path / 'config.json'}").dtype == dtype
    given = EngineConfig(str(tmp_path), dtype="float32", kv_cache_dtype="bfloat16")
    assert (given.dtype, given.cache_dtype) == ("fp32", "bf16")
    assert EngineConfig(str(tmp_path), kv_cache_dtype="fp8_e4m3").cache_dtype == "fp8"


def test_a_model_that_is_not_there_is_refused_later() -> None:
    assert EngineConfig("/no/such/folder").dtype == "fp32"


def test_the_line_of_the_kv_cache_counts_pages_of_tokens_and_slots() -> None:
    def shown(model: Path) -> str:
        (line,) = (
            each for each in derive_sizes(EngineConfig(str(model), pool_tokens=1000)).lines() if "KV" in each
        )
        return line.partition(";")[0]

    assert shown(tiny("llama")) == "KV cache of 1000 tokens per dp group: 63 pages of 16 tokens"
    of_windows = f"63 pages of 16 tokens (tokens), 63 pages of 16 tokens ({GROUP})"
    assert shown(windowed("gemma3_text")) == f"KV cache of 1000 tokens per dp group: {of_windows}"
    assert re.search(r": \d+ slots \(state\), 63 pages of 16 tokens \(tokens\)$", shown(hybrid("qwen3_next")))
