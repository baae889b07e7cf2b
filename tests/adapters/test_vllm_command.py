"""vLLM command lines as layouts and storages."""

from __future__ import annotations

import pytest

from baton.adapters.vllm.command import parse_command
from baton.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve M --tensor-parallel-size 4 --pipeline-parallel-size 2 --block-size 32 --dtype float16",
        "serve M -tp 4 -pp 2 --block-size=32 --dtype=half --max-model-len 4096",
        "M -tp=4 --pipeline_parallel_size 2 --block-size 8 --block-size 32 --dtype half --enforce-eager",
        "--port 8000 --model M -pp 2 -tp 4 --block_size 32 --dtype float16 --kv-cache-dtype auto",
    ],
)
def test_spellings(text: str) -> None:
    command = parse_command(text)
    assert (command.model, command.tp, command.pp, command.block_tokens) == ("M", 4, 2, 32)
    assert command.dtype == "fp16"
    assert command.storage == "hnd.fused.layer.granule32"


def test_defaults_are_those_of_vllm() -> None:
    command = parse_command("serve M --port 8000")
    assert (command.tp, command.pp, command.block_tokens, command.dtype) == (1, 1, 16, "bf16")
    assert command.layout(32) == "tp1"
    assert parse_command("serve M --dtype float16 --kv-cache-dtype fp8_e4m3").dtype == "fp8"
    assert parse_command("--port 8000").model == ""


@pytest.mark.parametrize(
    ("pp", "num_layers", "layout"),
    [
        (2, 32, "pp2:16-16.tp2"),
        (2, 33, "pp2:17-16.tp2"),
        (3, 32, "pp3:11-11-10.tp2"),
        (4, 33, "pp4:8-8-9-8.tp2"),
        (4, 35, "pp4:9-9-9-8.tp2"),
    ],
)
def test_layers_lie_where_vllm_puts_them(pp: int, num_layers: int, layout: str) -> None:
    """Extra layers go to the stages before the last one, the latest first."""
    assert parse_command(f"M -tp 2 -pp {pp}").layout(num_layers) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("M -tp 0", "--tensor-parallel-size is '0'; give a whole number from 1"),
        ("M -pp two", "--pipeline-parallel-size is 'two'"),
        ("M --block-size", "--block-size has no value"),
        ("M --decode-context-parallel-size 2", "cannot be handed over yet; use 1"),
        ("M --kv-cache-dtype int4", "dtype 'int4' is not known here; use one of auto, bfloat16"),
        ("M 'open", "No closing quotation"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command(text)
    assert message in str(caught.value)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="5 pipeline stages for 4 layers"):
        parse_command("M -pp 5").layout(4)
