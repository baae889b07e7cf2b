"""What a config or a checkpoint lacks is said in one line before a weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import CPU, Altered, DiskCheckpoint, Plan, Ranks, prompts, whole_logits
from tests.engine.tiny import FAMILIES, tiny

from baton.engine.models import moe
from baton.engine.models.base import Cut, Share
from baton.engine.models.build import _families, build, check_weights, describe
from baton.errors import ConfigError, EngineError

Q = "model.layers.1.self_attn.q_proj.weight"


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family], **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_is_described(family: str, models: Path) -> None:
    config = DiskCheckpoint(tiny(family, models)).config
    found = describe(config)
    assert (found.model_type, found.hidden_size, found.max_positions) == (family, 48, 4096)
    assert (found.num_layers, found.vocab_size) == (config["num_hidden_layers"], config["vocab_size"])
    assert (found.dtype, found.eos_ids) == ("float32", (2,))
    assert found.num_experts == (6 if "num_experts_per_tok" in FAMILIES[family] else 0)


def test_older_names_and_lists_are_read() -> None:
    config = config_of("llama", torch_dtype="bfloat16", eos_token_id=[2, 5])
    assert (describe(config).dtype, describe(config).eos_ids) == ("bfloat16", (2, 5))
    assert describe(config_of("llama", eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2"}, f"'gpt2' is not supported; use a model of one of {', '.join(_families())}"),
        ({}, "model_type None is not supported"),
        (config_of("llama", hidden_size=None), "hidden_size is missing"),
        (config_of("llama", num_key_value_heads=4), "num_key_value_heads is 4; it must divide"),
        (config_of("llama", hidden_act="relu6"), "hidden_act is 'relu6'; use one of silu"),
        (config_of("llama", partial_rotary_factor=0.5), "partial_rotary_factor turns 4 of 8"),
        (config_of("llama", dtype="int8"), "dtype is 'int8'; use one of float32"),
        (config_of("qwen3_moe", num_experts_per_tok=7), "num_experts_per_tok is 7"),
        (config_of("deepseek_v2", norm_topk_prob=True), "norm_topk_prob is True, which is not supported"),
        (config_of("deepseek_v2", topk_method="noaux_tc"), "topk_method is 'noaux_tc'; use one of greedy"),
        (config_of("deepseek_v3", scoring_func="softmax"), "scoring_func is 'softmax'"),
        (config_of("deepseek_v3", n_group=4), "n_group is 4; it must divide the 6"),
        (config_of("deepseek_v3", n_group=6), "two each"),
    ],
)
def test_a_config_that_cannot_run_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        describe(config)
    assert "\n" not in str(caught.value)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="beyond max_position_embeddings; use at most 4096"):
        describe(config_of("llama"), max_context=4097)


def test_layers_with_experts_are_every_so_many() -> None:
    sparse = {"n_routed_experts": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 6}
    names: list[str] = []

    class Names:
        config = config_of("deepseek_v3", **sparse)

        def shape(self, name: str) -> None:
            names.append(name)

        def read(
            self, name: str, index: tuple[slice, ...] = (), *, device: torch.device | None = None
        ) -> torch.Tensor:
            raise AssertionError(name)

    with pytest.raises(ConfigError):
        check_weights(Names())
    assert {name.split(".")[2] for name in names if "mlp.gate.weight" in name} == {"2", "4"}
    assert {name.split(".")[2] for name in names if "mlp.gate_proj.weight" in name} == {"0", "1", "3", "5"}


CUTS = [None, Cut((0, 2), Share(1, 2), Share(3, 4), torch.bfloat16, CPU)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_whole_checkpoint_is_not_read_to_be_checked(family: str, cut: Cut | None, models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny(family, models))
    check_weights(checkpoint, cut)
    assert checkpoint.num_read == {}


@pytest.mark.parametrize("cut", CUTS)
def test_missing_and_misshapen_tensors_are_named(cut: Cut | None, models: Path) -> None:
    whole = DiskCheckpoint(tiny("llama", models))
    altered = Altered(whole, {Q: None, "model.embed_tokens.weight": torch.zeros(100, 48)})
    with pytest.raises(ConfigError) as caught:
        check_weights(altered, cut)
    assert f"{Q} is missing from the checkpoint, (48, 48) is wanted" in str(caught.value)
    assert "model.embed_tokens.weight is (100, 48) in the checkpoint, (101, 48) is wanted" in str(
        caught.value
    )


def test_many_problems_are_counted(models: Path) -> None:
    whole = DiskCheckpoint(tiny("llama", models))
    with pytest.raises(ConfigError, match=r"and \d+ more$"):
        check_weights(Altered(whole, dict.fromkeys(whole.names())))


@pytest.mark.parametrize("tensor", [None, torch.zeros(48, 47)])
def test_loading_stops_at_a_bad_tensor(tensor: torch.Tensor | None, models: Path) -> None:
    altered = Altered(DiskCheckpoint(tiny("llama", models)), {Q: tensor})
    with pytest.raises(EngineError, match=f"{Q} is .* wanted"):
        Ranks(altered)


def test_a_file_that_belies_its_header_is_refused(models: Path) -> None:
    class Lying(DiskCheckpoint):
        def read(
            self, name: str, index: tuple[slice, ...] = (), *, device: torch.device | None = None
        ) -> torch.Tensor:
            found = super().read(name, index, device=device)
            return found[:-1] if name == Q else found

    with pytest.raises(EngineError, match=f"{Q}: read \\(47, 48\\) where the slice is \\(48, 48\\)"):
        Ranks(Lying(tiny("llama", models)))


def test_layers_that_are_not_there_are_refused(models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny("llama", models))
    with pytest.raises(ConfigError, match="layers 3 to 6 of a model with 5"):
        build(checkpoint, Cut((3, 6), Share(), Share(), torch.float32, CPU))


def test_no_position_past_the_maximum_context_is_computed(models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny("llama", models))
    ranks = Ranks(checkpoint, max_context=6)
    whole_logits(ranks, prompts(101, [6]))
    with pytest.raises(IndexError):
        whole_logits(Ranks(checkpoint, max_context=6), prompts(101, [7]))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_rank_chooses_the_same_experts(
    family: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = DiskCheckpoint(tiny(family, models))
    chosen: list[torch.Tensor] = []
    add_routed = moe.add_routed

    def record(fed: torch.Tensor, x: torch.Tensor, routed: moe.Routed, experts: moe.Experts) -> torch.Tensor:
        chosen.append(routed[1])
        return add_routed(fed, x, routed, experts)

    monkeypatch.setattr(moe, "add_routed", record)
    ranks = Ranks(checkpoint, Plan(tp=2))
    whole_logits(ranks, prompts(checkpoint.config["vocab_size"], [6]), num_chunk=6)
    num_layers = 3 if family == "deepseek_v3" else 4
    assert len(chosen) % (2 * num_layers) == 0
    for first, second in zip(chosen[::2], chosen[1::2], strict=True):
        assert torch.equal(first, second)
        assert first.shape[1] == 2
    assert all(
        len(set(row)) == 2 and min(row) >= 0 and max(row) < 6 for ids in chosen for row in ids.tolist()
    )


def test_a_layer_takes_no_rows(models: Path) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        checkpoint = DiskCheckpoint(tiny(family, models))
        (rank,) = Ranks(checkpoint).stages[0]
        nothing = torch.empty(0, 48)
        assert rank.layers[1].feed(nothing).shape == (0, 48)
        assert rank.embedding.embed(torch.empty(0, dtype=torch.int64)).shape == (0, 48)
        assert rank.head.logits(nothing).shape == (0, checkpoint.config["vocab_size"])
