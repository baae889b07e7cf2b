"""Safetensors folders: what is read is what was saved, and what is wrong is said in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.checkpoint.slices import check_slices, num_parameters, weight_bytes
from tests.engine.tiny import tiny

from baton.checkpoint.opening import open_checkpoint
from baton.checkpoint.safetensors import INDEX, SINGLE
from baton.errors import ConfigError

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama", shard_bytes=100_000), tmp_path / "sharded"))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(folder))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_reads_what_was_saved(folder: Path):
    saved = load_file(folder / SINGLE)
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.names()) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert num_parameters(checkpoint) == sum(tensor.numel() for tensor in saved.values())
    assert weight_bytes(checkpoint) == 4 * num_parameters(checkpoint)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == 2


def test_slices_of_one_file_and_of_shards(folder: Path, sharded: Path):
    assert len(list(sharded.glob("*.safetensors"))) > 3
    names = [Q, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    for each in (folder, sharded):
        check_slices(open_checkpoint(str(each)), names)


def test_slices_of_bf16_and_fp16(folder: Path):
    for dtype in (torch.bfloat16, torch.float16):
        saved = load_file(folder / SINGLE)
        save_file({name: tensor.to(dtype) for name, tensor in saved.items()}, folder / SINGLE)
        checkpoint = open_checkpoint(str(folder))
        assert checkpoint.dtype(Q) == dtype
        check_slices(checkpoint, [Q])


def test_what_is_read_survives_the_file(folder: Path):
    expected = load_file(folder / SINGLE)[Q].clone()
    found = open_checkpoint(str(folder)).read(Q)
    (folder / SINGLE).write_bytes(b"")
    assert torch.equal(found, expected)


def test_unknown_tensor(folder: Path):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.shape("nope") is None
    assert checkpoint.dtype("nope") is None
    with pytest.raises(ConfigError, match="no tensor nope"):
        checkpoint.read("nope")


def test_fingerprint_is_of_config_and_weights_and_nothing_else(folder: Path, sharded: Path):
    fingerprint = open_checkpoint(str(folder)).fingerprint()
    assert fingerprint == open_checkpoint(str(sharded)).fingerprint()
    assert fingerprint == open_checkpoint(str(tiny("llama"))).fingerprint()
    assert fingerprint != open_checkpoint(str(tiny("llama", seed=1))).fingerprint()

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert fingerprint == open_checkpoint(str(folder)).fingerprint()
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint != open_checkpoint(str(folder)).fingerprint()


@pytest.mark.parametrize("name", [Q, "model.norm.weight", "model.layers.4.mlp.up_proj.weight"])
def test_fingerprint_sees_one_changed_tensor(folder: Path, name: str):
    before = open_checkpoint(str(folder)).fingerprint()
    saved = load_file(folder / SINGLE)
    save_file({**saved, name: saved[name] * 1.001}, folder / SINGLE)
    assert open_checkpoint(str(folder)).fingerprint() != before


def test_config_missing_or_unreadable(folder: Path):
    (folder / "config.json").write_text("{")
    assert "config.json: is not JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "not an object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_weights_missing(folder: Path):
    (folder / SINGLE).unlink()
    assert "no .safetensors file" in refusal(folder)
    assert f"dummy:{folder}" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin, which cannot be read" in refusal(folder)


def test_several_files_without_an_index(sharded: Path):
    (sharded / INDEX).unlink()
    assert f"no {INDEX}" in refusal(sharded)


def test_shards_missing_are_listed(sharded: Path):
    gone = sorted(sharded.glob("*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    text = refusal(sharded)
    assert "lacks 2 of the" in text
    assert all(file.name in text for file in gone)


def test_index_without_a_map(sharded: Path):
    (sharded / INDEX).write_text("{}")
    assert "no weight_map" in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -4])
def test_file_cut_short(folder: Path, keep: int):
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:keep])
    assert "not a whole safetensors file" in refusal(folder)
