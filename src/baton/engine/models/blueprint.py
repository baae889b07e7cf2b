"""A model as its config describes it: every size and rule, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import GqaSpec
from baton.engine.models.layers import DecoderSpec, DraftSpec, MixerSpec, MlpSpec, Names, NormSpec
from baton.engine.models.mla import MlaSpec
from baton.engine.models.mlp import NAMES, DenseSpec
from baton.engine.models.moe import ClampedSpec, MoeSpec, Rule
from baton.engine.models.rope import RopeSpec, read_rope, rope_values, yarn_amplitude
from baton.plan.kinds import Paged
from baton.plan.models.families.attention import heads_and_dim
from baton.plan.models.fields import Reader
from baton.plan.ranges import to_ids


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model as its config describes it."""

    vocab_size: int
    is_tied: bool
    """The head's matrix is the embedding's."""
    norm: NormSpec
    """The last one, and those of the layers."""
    layers: tuple[DecoderSpec, ...]
    embedding_factor: float = 1.0
    """What embeddings are multiplied with before the first layer."""
    norm_name: str = "model.norm"
    """What the family calls the last norm."""
    head_factor: float = 1.0
    """What logits are multiplied with."""
    stage_starts: tuple[int, ...] | None = None
    """Layers that a pipeline stage may begin with, where not every one can."""
    draft: DraftSpec | None = None
    """The layer after the last one that guesses a token further, where the checkpoint has one."""

    @property
    def num_experts(self) -> int:
        """Routed experts of a mixture layer, 0 where there is none."""
        mlps = (layer.mlp for layer in self.layers)
        return max((mlp.num_experts for mlp in mlps if isinstance(mlp, MoeSpec | ClampedSpec)), default=0)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that are built alike: how a config is read, and defaults beside the common ones."""

    read: Callable[[ModelFields], Blueprint]
    defaults: Mapping[str, object] = field(default_factory=dict)


COMMON_DEFAULTS: Mapping[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def assemble(
    fields: ModelFields,
    mixers: Sequence[MixerSpec],
    mlps: Sequence[MlpSpec],
    names: Sequence[Names] | None = None,
    *,
    is_norm_centred: bool = False,
) -> Blueprint:
    """A model of decoder layers; the weights of centred norms are kept as their difference to 1."""
    norm = NormSpec(fields.number("hidden_size"), fields.real("rms_norm_eps"), is_norm_centred)
    parts = zip(mixers, mlps, names or [Names()] * len(mlps), strict=True)
    layers = tuple(DecoderSpec(norm, *part) for part in parts)
    return Blueprint(fields.number("vocab_size"), fields.flag("tie_word_embeddings"), norm, layers)


def read_activation(fields: ModelFields) -> str:
    """hidden_act, if it is one that is built here."""
    return fields.choice("hidden_act", NAMES) or "silu"


def read_dense(fields: ModelFields, has_bias: bool = False) -> DenseSpec:
    """The MLP of the dense layers."""
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    return DenseSpec(hidden, width, read_activation(fields), has_bias)


def read_moe(fields: ModelFields, num_experts: int, rule: Rule) -> MoeSpec:
    """A mixture of so many routed experts, without one that every token uses."""
    hidden, width = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    return MoeSpec(hidden, num_experts, width, read_activation(fields), rule)


def read_gqa(fields: ModelFields, *, is_partly_turned: bool = False) -> GqaSpec:
    """The attention of layers that cache keys and values, without norm or window."""
    hidden, num_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    num_kv_heads, head_dim = heads_and_dim(fields)
    rope = read_rope(fields, head_dim)
    if rope.dim != head_dim and not is_partly_turned:
        raise fields.refusal(
            f"partial_rotary_factor turns {rope.dim} of {head_dim} channels, "
            "which this family does not know; remove it"
        )
    has_bias = fields.flag("attention_bias")
    return GqaSpec(hidden, num_heads, num_kv_heads, head_dim, rope, has_bias, has_bias)


def read_windows(fields: ModelFields, read: Reader) -> list[int | None]:
    """The window of each layer, by the reader of what the family caches."""
    windows: dict[int, int | None] = {}
    for kind, layers in read(fields):
        assert isinstance(kind, Paged)
        windows |= dict.fromkeys(to_ids(layers), kind.window or None)
    return [windows[layer] for layer in range(fields.num_layers)]


# What the DeepSeek families share: latent attention, and mixtures that begin after some dense layers.


DENSE, SPARSE = "dense", "sparse"


def read_mla(fields: ModelFields) -> MlaSpec:
    """Latent attention; channels turn in pairs and stay in that order."""
    rope = replace(
        read_rope(fields, fields.number("qk_rope_head_dim")), is_paired_in=True, is_paired_out=True
    )
    plain_dim = fields.number("qk_nope_head_dim")
    return MlaSpec(
        hidden_size=fields.number("hidden_size"),
        num_heads=fields.number("num_attention_heads"),
        query_rank=fields.number_or_none("q_lora_rank"),
        latent_rank=fields.number("kv_lora_rank"),
        plain_dim=plain_dim,
        rope=rope,
        value_dim=fields.number("v_head_dim"),
        scale=(plain_dim + rope.dim) ** -0.5 * _amplification(fields, rope),
        has_bias=fields.flag("attention_bias"),
    )


def _amplification(fields: ModelFields, rope: RopeSpec) -> float:
    """What stretched positions add to the scale of scores, by DeepSeek's mscale_all_dim."""
    weight = rope_values(fields).get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return 1.0
    return (
        yarn_amplitude(
            rope.scaling.factor, ModelFields(fields.where, {"mscale_all_dim": weight}).real("mscale_all_dim")
        )
        ** 2
    )


def read_groups(fields: ModelFields) -> tuple[int, int]:
    """How many groups the experts are in, and how many of them a token may use."""
    num_groups = fields.number_or_none("n_group") or 1
    chosen = fields.number_or_none("topk_group", num_groups) or num_groups
    num_experts = fields.number("n_routed_experts")
    if num_experts % num_groups:
        raise fields.refusal(f"n_group is {num_groups}; it must divide the {num_experts} n_routed_experts")
    return num_groups, chosen


def assemble_latent(
    fields: ModelFields, mixers: Sequence[MlaSpec], rule: Rule, has_mlp_bias: bool = False
) -> Blueprint:
    """The model, its first layers dense."""
    dense = read_dense(fields, has_mlp_bias)
    sparse = read_moe(fields, fields.number("n_routed_experts"), rule)
    shared = fields.number_or_none("n_shared_experts", least=0)
    sparse = replace(
        sparse,
        is_routed_in_float32=True,
        shared=replace(dense, width=sparse.width * shared) if shared else None,
    )
    first = fields.number("first_k_dense_replace", least=0)
    step = fields.number("moe_layer_freq")
    types = fields.per_layer("mlp_layer_types", (DENSE, SPARSE))
    if types is None:
        types = [SPARSE if i >= first and i % step == 0 else DENSE for i in range(fields.num_layers)]
    made = assemble(fields, mixers, [sparse if kind == SPARSE else dense for kind in types])
    has_draft = bool(fields.number_or_none("num_nextn_predict_layers", least=0))
    return replace(made, draft=DraftSpec(made.layers[-1]) if has_draft else None)
