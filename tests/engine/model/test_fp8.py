"""fp8 checkpoints compute what `transformers` computes with the dequantised weights, on every tp rank."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.checkpoint.slices import check_slices
from tests.engine.fp8 import BLOCK, quantised
from tests.engine.hybrids import hybrid
from tests.engine.model.reference import Plan, Ranks, oracle_logits, prompts, whole_logits, worst
from tests.engine.tiny import tiny, windowed
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from baton.checkpoint.opening import open_checkpoint
from baton.checkpoint.safetensors import SafetensorsFolder
from baton.errors import ConfigError
from baton.plan.ranges import Range

CLOSE = 1e-5
SEEN = 1e-3
CASES = {"qwen3_moe": tiny, "deepseek_v3": tiny, "qwen3_5_moe_text": hybrid, "gpt_oss": windowed}
"""The last one has all experts in one tensor."""


def made(family: str, folder: Path) -> tuple[Path, Path]:
    return quantised(CASES.get(family, tiny)(family), folder)


def differs(fp8: Path, dequantised: Path, tp: int) -> float:
    checkpoint = open_checkpoint(str(fp8))
    sequences = prompts(checkpoint.config["vocab_size"])
    found = whole_logits(Ranks(checkpoint, Plan(tp=tp)), sequences)
    return worst(found, oracle_logits(dequantised, sequences))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_logits(family: str, tp: int, tmp_path: Path) -> None:
    assert differs(*made(family, tmp_path), tp) < CLOSE


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_weights_are_the_dequantised_ones_in_every_slice(family: str, tmp_path: Path) -> None:
    fp8, dequantised = made(family, tmp_path)
    checkpoint = open_checkpoint(str(fp8))
    wanted = load_file(dequantised / "model.safetensors")
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    narrow = [name for name in wanted if checkpoint.shape(f"{name}_scale_inv")]
    assert narrow
    check_slices(checkpoint, narrow)


def test_weights_are_those_of_transformers(tmp_path: Path) -> None:
    """Which divides tensors into blocks of one size, so that sizes have to be multiples."""
    sizes = {"hidden_size": 120, "intermediate_size": 180, "num_attention_heads": 6, "head_dim": 20}
    fp8, _ = quantised(tiny("llama", num_key_value_heads=3, **sizes), tmp_path)
    checkpoint, stored = open_checkpoint(str(fp8)), load_file(fp8 / "model.safetensors")
    narrow = [name for name in stored if f"{name}_scale_inv" in stored]
    assert narrow
    for name in narrow:
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(checkpoint.read(name), theirs)


def test_scales_in_bf16(tmp_path: Path) -> None:
    fp8, _ = made("qwen3", tmp_path)
    stored = load_file(fp8 / "model.safetensors")
    rounded = {name: each.bfloat16() if "scale_inv" in name else each for name, each in stored.items()}
    save_file(rounded, fp8 / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    first = rounded[f"{name}_scale_inv"].float()[0, 0] * stored[name].float()[0, 0]
    assert open_checkpoint(str(fp8)).read(name)[0, 0] == first


Scales = Callable[[SafetensorsFolder, str, Sequence[Range]], torch.Tensor]


def _transposed(scales: Scales) -> Scales:
    def wrong(self: SafetensorsFolder, name: str, ranges: Sequence[Range]) -> torch.Tensor:
        whole = self.read(f"{name}_scale_inv").mT.contiguous()
        rows, columns = (torch.arange(*part) // size for part, size in zip(ranges, BLOCK, strict=True))
        return whole[rows[:, None] % whole.shape[0], columns % whole.shape[1]]

    return wrong


def _from_the_slice(scales: Scales) -> Scales:
    """Blocks counted from the first row and column of the slice."""

    def wrong(self: SafetensorsFolder, name: str, ranges: Sequence[Range]) -> torch.Tensor:
        return scales(self, name, [(0, stop - start) for start, stop in ranges])

    return wrong


def _whole_blocks(scales: Scales) -> Scales:
    """The right blocks, as though each slice began at the edge of one."""

    def wrong(self: SafetensorsFolder, name: str, ranges: Sequence[Range]) -> torch.Tensor:
        sizes = (1,) * (len(ranges) - 2) + BLOCK
        moved = [
            (start // size * size, start // size * size + stop - start)
            for (start, stop), size in zip(ranges, sizes, strict=True)
        ]
        return scales(self, name, moved)

    return wrong


def _next_block(scales: Scales) -> Scales:
    def wrong(self: SafetensorsFolder, name: str, ranges: Sequence[Range]) -> torch.Tensor:
        return scales(self, name, ranges).roll(BLOCK[0], -2)

    return wrong


@pytest.mark.long
@pytest.mark.parametrize("broken", [_transposed, _from_the_slice, _whole_blocks, _next_block])
def test_wrong_scales_are_seen(
    broken: Callable[[Scales], Scales], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = made("deepseek_v3", tmp_path)
    monkeypatch.setattr(SafetensorsFolder, "_scales", broken(SafetensorsFolder._scales))
    assert differs(*folders, 2) > SEEN


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128]},
    ],
)
def test_other_quantisations_are_refused(stated: dict[str, object], tmp_path: Path) -> None:
    fp8, _ = made("qwen3", tmp_path)
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(ConfigError, match=rf"quantised \({stated['quant_method']}.*use a checkpoint in bf16"):
        open_checkpoint(str(fp8))


def test_missing_and_misshapen_scales_are_named(tmp_path: Path) -> None:
    fp8, _ = made("qwen3", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(fp8 / "model.safetensors")
    for scales, problem in ((None, "is missing"), (torch.ones(4, 5), "is F32 (4, 5)")):
        others = {key: each for key, each in stored.items() if key != f"{name}_scale_inv"}
        save_file(
            others | ({} if scales is None else {f"{name}_scale_inv": scales}), fp8 / "model.safetensors"
        )
        with pytest.raises(ConfigError, match=re.escape(f"{name}_scale_inv {problem}, (5, 4) is expected")):
            open_checkpoint(str(fp8))


def test_fp8_without_a_config_for_it_is_refused(tmp_path: Path) -> None:
    fp8, dequantised = made("qwen3", tmp_path)
    (fp8 / "config.json").write_text((dequantised / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"is F8_E4M3 .* without block scales"):
        open_checkpoint(str(fp8))
