"""Rotations against those of `transformers`, far out too and over part of a head."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from baton.engine.models.config import ModelFields
from baton.engine.models.rope import Rope, read_rope
from baton.errors import ConfigError

CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    "yarn-stated": {
        "factor": 4.0,
        "attention_factor": 0.9,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 3,
    },
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "yarn-derived": {"factor": None, "original_max_position_embeddings": 1024},
}
POSITIONS = torch.tensor([0, 1, 2, 777, 4096, 100_000, 131_071])


def fields(**values: Any) -> ModelFields:
    return ModelFields("config", {"max_position_embeddings": 131_072, **values})


@pytest.mark.parametrize("name", SETTINGS)
def test_rotations_are_those_of_transformers(name: str) -> None:
    stated = {"rope_theta": 10_000.0, **SETTINGS[name], "rope_type": name.partition("-")[0]}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=131_072, rope_parameters=dict(stated)
    )
    q, k = torch.randn(2, 7, 3, 64, generator=torch.Generator().manual_seed(3))
    cos, sin = LlamaRotaryEmbedding(config)(q, POSITIONS[None])
    wanted_q, wanted_k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rope = Rope(read_rope(fields(rope_parameters=stated), 64), torch.float32, CPU)
    torch.testing.assert_close(rope.rotate(q, POSITIONS), wanted_q[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rope.rotate(k, POSITIONS), wanted_k[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        rope.rotate(q, POSITIONS + 1 - (POSITIONS > 777).long()), wanted_q[0], atol=1e-2
    )


def test_part_of_a_head_is_turned_and_the_rest_kept() -> None:
    config = PhiConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    )
    q = torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(3))
    cos, sin = PhiRotaryEmbedding(config)(q, POSITIONS[None])
    wanted, _ = apply_rotary_pos_emb(q[None, ..., :16], q[None, ..., :16], cos, sin, unsqueeze_dim=2)
    rope = Rope(read_rope(fields(rope_theta=10_000.0, partial_rotary_factor=0.5), 32), torch.float32, CPU)
    turned = rope.rotate(q, POSITIONS)
    torch.testing.assert_close(turned[..., :16], wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[..., 16:], q[..., 16:])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported; use one of default"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor is 0.0; it must be above 0"),
        ({"rope_parameters": [1]}, "must be a JSON object"),
        ({"partial_rotary_factor": 0.33}, "cannot be rotated in pairs"),
    ],
)
def test_what_cannot_be_turned_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_rope(fields(**values), 64)


def test_a_position_past_the_table_is_an_error() -> None:
    rope = Rope(read_rope(fields(max_position_embeddings=8), 4), torch.float32, CPU)
    with pytest.raises(IndexError):
        rope.rotate(torch.ones(1, 1, 4), torch.tensor([8]))
