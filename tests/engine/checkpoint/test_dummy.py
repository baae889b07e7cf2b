"""Random weights: the shapes of the real model, and the same numbers however they are asked for."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from tests.engine.checkpoint.slices import check_slices, num_parameters, weight_bytes
from tests.engine.tiny import FAMILIES, tiny

from baton.checkpoint.opening import open_checkpoint

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_saved_model(family: str):
    folder = tiny(family)
    real, dummy = open_checkpoint(str(folder)), open_checkpoint(f"dummy:{folder}")
    assert num_parameters(dummy) == num_parameters(real)
    assert dummy.config == real.config
    # Experts are saved one by one and made as one tensor per layer; all else has the same names.
    plain = {name for name in real.names() if ".mlp.experts." not in name}
    assert plain == {name for name in dummy.names() if ".mlp.experts." not in name}
    assert all(dummy.shape(name) == real.shape(name) for name in plain)


def test_slices_are_slices_of_the_whole():
    dummy = open_checkpoint(f"dummy:{tiny('deepseek_v3')}")
    check_slices(
        dummy, ["model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
    )
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    whole = dummy.read(experts)
    index = (slice(2, 5), slice(3, 30), slice(7, 40))
    assert torch.equal(dummy.read(experts, index), whole[index])


def test_numbers_are_spread_and_rows_differ():
    dummy = open_checkpoint("dummy:smollm2-135m")
    matrix = dummy.read(Q, dtype=torch.float32)
    assert matrix.std().item() == pytest.approx(576**-0.5, rel=0.01)
    assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
    between = torch.corrcoef(matrix) - torch.eye(len(matrix))
    assert between.abs().max() < 0.3
    assert not torch.equal(matrix, dummy.read(Q.replace("layers.0", "layers.1"), dtype=torch.float32))
    norm = dummy.read("model.norm.weight", dtype=torch.float32)
    assert norm.mean().item() == pytest.approx(1, abs=0.05)
    assert dummy.read(Q).dtype == torch.bfloat16


@pytest.mark.slow
def test_another_process_has_the_same_numbers():
    program = f"""
from baton.checkpoint.opening import open_checkpoint
print(open_checkpoint("dummy:smollm2-135m").read({Q!r}, (slice(5, 6),)).double().sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = open_checkpoint("dummy:smollm2-135m").read(Q, (slice(5, 6),)).double().sum().item()
    assert float(done.stdout) == here


@pytest.mark.parametrize(
    ("card", "billions"),
    [("llama-3-8b", 8.03), ("smollm2-135m", 0.1345), ("qwen3-30b-a3b", 30.5), ("deepseek-v3", 671.0)],
)
def test_cards_have_the_size_of_their_models(card: str, billions: float):
    dummy = open_checkpoint(f"dummy:{card}")
    assert num_parameters(dummy) / 1e9 == pytest.approx(billions, rel=0.003)
    assert weight_bytes(dummy) == 2 * num_parameters(dummy)
    assert dummy.path is None
    assert dummy.fingerprint() == open_checkpoint(f"dummy:{card}").fingerprint()


def test_saved_experts_are_one_tensor_each():
    with safe_open(tiny("qwen3_moe") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {f"model.layers.0.mlp.experts.{i}.gate_proj.weight" for i in range(6)} <= names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
