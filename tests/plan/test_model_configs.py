"""Hugging Face configs: which fields count, what they default to, and every refusal."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.model_views import briefs, layers_of

from baton.errors import ConfigError
from baton.plan.cache import Cache
from baton.plan.models import load_cache, read_card
from baton.plan.models.config import read_cache, read_config
from baton.plan.models.parts import stack

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
LATENT = {"model_type": "deepseek_v3", "num_hidden_layers": 6, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DELTA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
MAMBA = {
    **LLAMA,
    "model_type": "falcon_h1",
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}


def from_config(**fields: object) -> Cache:
    return stack([read_config(fields, "config test")])


def test_announced_draft_layers_are_not_added() -> None:
    assert from_config(**LATENT, num_nextn_predict_layers=1) == load_cache("latent:layers=6,dim=576")


def test_a_draft_keeps_what_the_last_attention_does() -> None:
    card = {**read_card("qwen3-next-80b-a3b"), "num_hidden_layers": 46}
    cache = read_cache(card, "card", has_draft=True)
    drafted = {part.name: part for part in cache.components if part.name.startswith("draft.")}
    assert {name: part.layers for name, part in drafted.items()} == {
        "draft.0.k": ((46, 47),),
        "draft.0.v": ((46, 47),),
    }
    assert drafted["draft.0.k"].num_units == 2


def test_fields_of_a_config_default_as_in_transformers() -> None:
    assert briefs(from_config(**LLAMA))["k"] == (((0, 4),), 8, "head", (64,), None, None)
    assert briefs(from_config(**LLAMA, num_key_value_heads=2, head_dim=96))["v"][1:4] == (2, "head", (96,))
    assert from_config(**LLAMA, num_key_value_heads=None, head_dim=None) == from_config(**LLAMA)
    qwen3 = from_config(**{**LLAMA, "model_type": "qwen3"})
    assert briefs(qwen3)["k"][3] == (128,)
    gemma = from_config(
        model_type="gemma3", text_config={"model_type": "gemma3_text", "num_hidden_layers": 7}
    )
    assert briefs(gemma)["k"] == (((5, 6),), 4, "head", (256,), None, None)
    assert layers_of(gemma, "k.w4096") == ((0, 5), (6, 7))


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "mistral"}, ((0, 4),)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mixtral"}, ()),
        ({"model_type": "phi3", "sliding_window": 4096}, ((0, 4),)),
        ({"model_type": "qwen2", "max_window_layers": 1}, ()),
        ({"model_type": "qwen2", "max_window_layers": 1, "use_sliding_window": True}, ((1, 4),)),
        ({"model_type": "qwen3", "use_sliding_window": True}, ()),
        ({"model_type": "qwen3", "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, ()),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 1}, ((0, 4),)),
        ({"model_type": "gpt_oss", "sliding_window": 4096}, ((0, 1), (2, 3))),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, ((0, 2), (3, 4))),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 4096,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            },
            ((1, 3),),
        ),
    ],
)
def test_which_layers_have_a_window(fields: dict[str, object], windowed: tuple[tuple[int, int], ...]) -> None:
    cache = from_config(**{**LLAMA, **fields})
    assert (layers_of(cache, "k.w4096") if "k.w4096" in cache.by_name else ()) == windowed


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
)
def test_delta_net_families(model_type: str) -> None:
    flat = from_config(model_type=model_type, **DELTA, mamba_ssm_dtype="bfloat16")
    assert briefs(flat)["ssm"] == (((0, 3),), 4, "value head", (32 * 16,), None, "bf16")
    assert briefs(flat)["conv.v"] == (((0, 3),), 4, "value head", (16, 3), None, None)
    assert briefs(flat)["k"] == (((3, 4),), 2, "head", (256,), None, None)
    nested = from_config(model_type="qwen3_5", text_config={**DELTA, "layer_types": ["full_attention"] * 4})
    assert [component.name for component in nested.components] == ["k", "v"]


def test_mamba_and_indexer_fields() -> None:
    automatic = from_config(**{**MAMBA, "mamba_d_head": "auto", "mamba_d_ssm": 128})
    assert automatic == from_config(**MAMBA)
    expanded = from_config(**{**MAMBA, "mamba_d_head": "auto", "mamba_expand": 2})
    assert briefs(expanded)["conv.x"][3] == (128, 3)
    some = {**MAMBA, "model_type": "bamba", "attn_layer_indices": [0, 2]}
    assert layers_of(from_config(**some), "k") == ((0, 1), (2, 3))
    assert layers_of(from_config(**some), "ssm") == ((1, 2), (3, 4))
    assert layers_of(from_config(**{**some, "attn_layer_indices": None}), "conv.B") == ((0, 4),)
    with pytest.raises(ConfigError, match=r"attn_layer_indices is \[4\]; it must list layers below 4"):
        from_config(**{**some, "attn_layer_indices": [4]})
    for name in ("deepseek_v32", "deepseek_v3_2"):
        cache = from_config(**{**LATENT, "model_type": name, "index_head_dim": 128})
        assert cache == load_cache("latent:layers=6,dim=576,index=128")
    shared = {**LATENT, "model_type": "glm_moe_dsa", "index_head_dim": 128}
    by_period = from_config(**shared, index_topk_freq=4, index_skip_topk_offset=3)
    listed = from_config(**shared, indexer_types=["full", "full", "full", "shared", "shared", "shared"])
    assert layers_of(by_period, "index_k") == layers_of(listed, "index_k") == ((0, 3),)
    assert layers_of(listed, "latent") == ((0, 6),)


BAD_FILES = {
    "not JSON": ("{", "is not JSON"),
    "not text": ("\x00", "is not JSON"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "not an object": ("[1]", "holds [1]"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_unreadable_configs_are_refused(tmp_path: Path, case: str) -> None:
    content, reason = BAD_FILES[case]
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_cache(str(tmp_path))
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"folder .* has no config\.json"):
        load_cache(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_cache(str(tmp_path))

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
        load_cache(str(tmp_path))


BAD_FIELDS: list[tuple[dict[str, object], str]] = [
    ({}, "model_type None is not supported"),
    (
        {"model_type": "gpt2"},
        "model_type 'gpt2' is not supported; use one of bamba, deepseek_v2, deepseek_v3",
    ),
    ({**LLAMA, "text_config": 3}, "text_config is 3"),
    ({**LLAMA, "text_config": {"model_type": "clip"}}, "'clip'"),
    ({"model_type": "llama"}, "num_hidden_layers is missing"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({**LLAMA, "num_hidden_layers": 100_001}, "num_hidden_layers is 100001"),
    ({**LLAMA, "num_attention_heads": True}, "num_attention_heads is True"),
    ({**LLAMA, "num_attention_heads": "8"}, "num_attention_heads is '8'"),
    ({**LLAMA, "num_attention_heads": 7}, "hidden_size is 512"),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ({**LLAMA, "head_dim": -1}, "head_dim is -1"),
    ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
    ({**LLAMA, "model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ({**LLAMA, "model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types is ['full_attention']"),
    ({**LLAMA, "layer_types": "full"}, "layer_types is 'full'"),
    ({**LLAMA, "layer_types": [[], 1, 2, 3]}, "layer_types has []"),
    ({**LLAMA, "layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window is null"),
    (
        {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512},
        "qk_rope_head_dim is missing",
    ),
    ({**LATENT, "model_type": "deepseek_v32"}, "index_head_dim is missing"),
    ({**LATENT, "model_type": "glm_moe_dsa", "index_head_dim": 8, "indexer_types": ["shared"] * 6}, "'full'"),
    (
        {**LATENT, "model_type": "glm_moe_dsa", "index_head_dim": 8, "index_topk_pattern": "FSSFSS"},
        "spell it out",
    ),
    ({**DELTA, "model_type": "qwen3_next", "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ({**DELTA, "model_type": "qwen3_next", "linear_num_key_heads": 3}, "linear_num_value_heads is 4"),
    ({**DELTA, "model_type": "qwen3_next", "mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype is 'int8'"),
    ({**DELTA, "model_type": "qwen3_next", "linear_key_head_dim": 1 << 24}, "component ssm"),
    ({**MAMBA, "mamba_n_groups": 3}, "mamba_n_groups is 3"),
    ({**MAMBA, "mamba_d_ssm": 100}, "do not make up 100"),
    ({**MAMBA, "mamba_d_head": "auto", "mamba_d_ssm": 4}, "do not make up 4"),
    ({**LLAMA, "baton": {"active_parameters": -1}}, "active_parameters is -1"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_FIELDS)
def test_bad_configs_are_refused_in_one_line(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config(**fields)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def refusal(fields: dict[str, object]) -> str | None:
    """Why the config is refused, if it is."""
    try:
        assert from_config(**fields).components
    except ConfigError as error:
        return str(error)
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "float32", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
MODEL_TYPES = [
    "llama",
    "qwen2",
    "qwen3_moe",
    "gemma3",
    "gpt_oss",
    "glm_moe_dsa",
    "qwen3_5",
    "falcon_h1",
    "bamba",
]


@given(st.sampled_from(MODEL_TYPES), st.data())
def test_any_config_is_a_cache_or_a_refusal(model_type: str, data: st.DataObject) -> None:
    whole = {**MAMBA, **LATENT, **DELTA, "sliding_window": 16, "index_head_dim": 8, "model_type": model_type}
    names = [*whole, "layer_types", "indexer_types", "use_sliding_window", "head_dim", "text_config", "baton"]
    names += ["attn_layer_indices"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), JSON | st.integers(1, 64), max_size=4))
    assert len((refusal({**whole, **changes}) or "").splitlines()) <= 1
