"""GGUF files: the numbers that `transformers` makes of them, whole and in slices."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from tests.engine.checkpoint.packed import pack
from tests.engine.checkpoint.slices import check_slices, num_parameters
from tests.engine.tiny import oracle, tiny
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.checkpoint.gguf_header import GgufHeader
from baton.checkpoint.opening import open_checkpoint
from baton.errors import ConfigError

# Quantised rows come in blocks of 32 numbers, so sizes are multiples of that.
WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
KINDS = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_1,
]
Q = "model.layers.1.self_attn.q_proj.weight"


def wide(family: str = "llama", **changes: Any) -> Path:
    return tiny(family, **{**WIDE, **changes})


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_that_were_packed(tmp_path: Path, kind: GGMLQuantizationType):
    folder = wide()
    real = open_checkpoint(str(folder))
    found = open_checkpoint(str(pack(folder, tmp_path / "model.gguf", kind)))
    assert set(found.names()) == set(real.names())
    assert num_parameters(found) == num_parameters(real)
    for name in real.names():
        values = real.read(name)
        if values.dim() > 1:
            values = torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind).copy())
        assert torch.equal(found.read(name, dtype=torch.float32), values), name


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4]], ids=lambda kind: kind.name)
def test_numbers_and_config_are_those_of_transformers(tmp_path: Path, kind: GGMLQuantizationType):
    path = pack(wide(), tmp_path / "model.gguf", kind)
    found = open_checkpoint(str(path))
    config = AutoConfig.from_pretrained(str(tmp_path), gguf_file=path.name, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(found.names())
    for name, values in theirs.items():
        assert torch.equal(found.read(name), values), name
    ours = LlamaConfig(**{key: value for key, value in found.config.items() if key != "model_type"})
    for key in (*WIDE, "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps"):
        assert getattr(ours, key) == getattr(config, key), key
    assert ours.rope_parameters == config.rope_parameters
    assert ours.tie_word_embeddings == config.tie_word_embeddings is False


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4]], ids=lambda kind: kind.name)
def test_slices_are_slices_of_the_whole(tmp_path: Path, kind: GGMLQuantizationType):
    found = open_checkpoint(str(pack(wide(), tmp_path / "model.gguf", kind)))
    check_slices(
        found, [Q, Q.replace("q_proj", "k_proj"), "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
    )
    index = (slice(7, 41), slice(33, 63))
    assert torch.equal(found.read(Q, index), found.read(Q)[index])


def test_tokens_are_those_of_the_folder(tmp_path: Path):
    folder = wide()
    path = pack(folder, tmp_path / "model.gguf")
    prompts = [[3, 4, 5, 6, 7, 8, 9], [11]]
    assert oracle(path, prompts, 12) == oracle(folder, prompts, 12)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families_whose_rows_are_stored_as_they_are(tmp_path: Path, family: str):
    folder = wide(family)
    real, found = open_checkpoint(str(folder)), open_checkpoint(str(pack(folder, tmp_path / "model.gguf")))
    assert set(found.names()) == set(real.names())
    assert all(torch.equal(found.read(name), real.read(name)) for name in real.names())
    assert found.config["tie_word_embeddings"] == real.config["tie_word_embeddings"]
    assert oracle(tmp_path / "model.gguf", [[5, 6, 7]], 8) == oracle(folder, [[5, 6, 7]], 8)


def test_biases_of_q_and_k_are_turned_too(tmp_path: Path):
    folder = wide(attention_bias=True)
    real, found = open_checkpoint(str(folder)), open_checkpoint(str(pack(folder, tmp_path / "model.gguf")))
    assert found.config["attention_bias"]
    names = [Q.replace("q_proj.weight", f"{each}.bias") for each in ("q_proj", "k_proj", "v_proj")]
    assert all(torch.equal(found.read(name), real.read(name)) for name in names)
    check_slices(found, names)


def test_frequencies_of_llama_3_are_recognised(tmp_path: Path):
    rule = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # Long heads, so that some waves are long enough to be slowed down, some partly.
    shape = {"head_dim": 128, "rope_parameters": rule, "max_position_embeddings": 65536}
    scaled = LlamaConfig(**WIDE | shape)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    plain = 10000.0 ** -(torch.arange(0, 128, 2) / 128)
    factors = (plain / frequencies).tolist()
    assert len({round(each, 3) for each in factors}) > 3
    folder = wide(head_dim=128)
    found = open_checkpoint(str(pack(folder, tmp_path / "model.gguf", factors=factors)))
    assert found.config["rope_scaling"] == {key: rule[key] for key in rule if key != "rope_theta"}
    factors[40] *= 1.5
    pack(folder, tmp_path / "other.gguf", factors=factors)
    assert "does not follow the rule of Llama 3" in refusal(tmp_path / "other.gguf")


def test_header_is_read_as_the_package_reads_it(tmp_path: Path):
    more = {
        "tokenizer.ggml.tokens": ["a", "\u00e9", ""],
        "tokenizer.ggml.scores": [0.5, -1.0],
        "tokenizer.ggml.add_bos_token": True,
    }
    path = pack(wide(), tmp_path / "model.gguf", KINDS[3], more)
    header, theirs = GgufHeader.open(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    assert header.metadata["tokenizer.ggml.tokens"] == more["tokenizer.ggml.tokens"]
    for tensor in theirs.tensors:
        listed = header.tensors[tensor.name]
        assert listed.shape == tuple(reversed(tensor.shape.tolist()))
        assert (listed.kind, listed.start) == (tensor.tensor_type, tensor.data_offset)


def test_fingerprint_is_of_the_content(tmp_path: Path):
    one = pack(wide(), tmp_path / "one.gguf", KINDS[3])
    same = pack(wide(), tmp_path / "same.gguf", KINDS[3])
    other = pack(wide(seed=1), tmp_path / "other.gguf", KINDS[3])
    kind = pack(wide(), tmp_path / "kind.gguf", KINDS[4])
    marks = [open_checkpoint(str(path)).fingerprint() for path in (one, same, other, kind)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def test_folder_with_one_gguf_file(tmp_path: Path):
    path = pack(wide(), tmp_path / "model.gguf")
    assert open_checkpoint(str(tmp_path)).path == path


def test_file_cut_short(tmp_path: Path):
    path = pack(wide(), tmp_path / "model.gguf", KINDS[3])
    whole = path.read_bytes()
    for keep in (0, 3, 20, 200, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:keep])
        refusal(path)


def test_other_models_are_refused_by_name(tmp_path: Path):
    path = pack(wide(), tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    assert "GGUF architecture 'mamba' is not supported; use one of llama, qwen2, qwen3" in refusal(path)
    path.write_bytes(content.replace(b"ffn_gate", b"ffn_gaga"))
    assert "tensor blk.0.ffn_gaga.weight has no place" in refusal(path)
    part = pack(wide(), tmp_path / "part.gguf", more={"llama.rope.dimension_count": 8})
    assert "rotates 8 of 16 channels" in refusal(part)


def test_without_the_package_the_line_that_installs_it_is_said(tmp_path: Path):
    floats = pack(wide(), tmp_path / "floats.gguf")
    packed = pack(wide(), tmp_path / "packed.gguf", KINDS[3])
    program = """
import sys
sys.modules["gguf"] = None
from baton.checkpoint.opening import open_checkpoint
from baton.errors import ConfigError
open_checkpoint(sys.argv[1]).read("model.norm.weight")
try:
    open_checkpoint(sys.argv[2])
except ConfigError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(floats), str(packed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install gguf" in done.stdout
