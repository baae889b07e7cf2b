"""Tiny checkpoints with a draft layer, and what such a draft guesses.

By the layers of `transformers` for DeepSeek; for Qwen3-Next and Qwen3.5, whose draft it does not have, by
plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from tests.engine.hybrids import HYBRIDS, LINEAR, hybrid
from tests.engine.tiny import FAMILIES, FULL, oracle, tiny
from transformers import AutoModelForCausalLM
from transformers.utils import logging

NUM_LAYERS = 4
SOFT, DRAFT_SOFT = 0.008, 0.04
"""What layers add, and the draft's, is scaled by it: many tokens follow from the one before, as a draft can
guess, and which ones it guesses still depends on all that it attends to."""


def drafted(family: str, *, is_random: bool = False) -> Path:
    """A checkpoint whose draft is right about half the time or, `is_random`, hardly ever.

    The layer after the model's last is the draft's own: the checkpoint is that of a model one layer longer.
    """
    whole = tiny(family, num_hidden_layers=NUM_LAYERS + 1)
    where = whole.with_name(f"{whole.name}-draft{'-random' if is_random else ''}")
    if (where / "config.json").is_file():
        return where
    tensors = load_file(whole / "model.safetensors")
    hidden, prefix = FAMILIES[family]["hidden_size"], f"model.layers.{NUM_LAYERS}"
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(DRAFT_SOFT if name.startswith(prefix) else SOFT)
    made = torch.Generator().manual_seed(1)
    near = torch.cat((torch.eye(hidden), 0.02 * torch.randn(hidden, hidden, generator=made)), dim=1)
    joined = torch.randn(hidden, 2 * hidden, generator=made) if is_random else near
    tensors[f"{prefix}.eh_proj.weight"] = joined.contiguous()
    for name in ("enorm", "hnorm"):
        tensors[f"{prefix}.{name}.weight"] = 1 + 0.02 * torch.randn(hidden, generator=made)
    tensors[f"{prefix}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "layer_types", "indexer_types"):
        if config.get(name):
            config[name] = config[name][:NUM_LAYERS]
    where.mkdir(exist_ok=True)
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    (where / "config.json").write_text(json.dumps(config))
    return where


MTP_SOFT = {"qwen3_next": 0.005, "qwen3_5_text": 0.05, "qwen3_5_moe_text": 0.01}
"""The same, so that their drafts are right and wrong as well."""


def drafted_hybrid(family: str) -> Path:
    """The same for Qwen3-Next and Qwen3.5; the model's last layer is recurrent, its draft's is attention."""
    types = [LINEAR, LINEAR, FULL, LINEAR]
    whole = hybrid(family, num_hidden_layers=NUM_LAYERS + 1, layer_types=[*types, FULL])
    where = whole.with_name(f"{whole.name}-mtp")
    if (where / "config.json").is_file():
        return where
    found, tensors = load_file(whole / "model.safetensors"), {}
    hidden, prefix = HYBRIDS[family]["hidden_size"], f"model.layers.{NUM_LAYERS}."
    for name, tensor in found.items():
        is_draft = name.startswith(prefix)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(DRAFT_SOFT if is_draft else MTP_SOFT[family])
        tensors[f"mtp.layers.0.{name.removeprefix(prefix)}" if is_draft else name] = tensor
    made = torch.Generator().manual_seed(1)
    tensors["mtp.fc.weight"] = torch.cat(
        (torch.eye(hidden), 0.02 * torch.randn(hidden, hidden, generator=made)), dim=1
    ).contiguous()
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.02 * torch.randn(hidden, generator=made)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": types}
    if family != "qwen3_next":
        config["mtp_num_hidden_layers"] = 1
    where.mkdir(exist_ok=True)
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    (where / "config.json").write_text(json.dumps(config))
    return where


@dataclass(frozen=True)
class Count:
    """How often a draft guessed, and was right."""

    drafted: int
    accepted: int

    def __add__(self, other: Count) -> Count:
        return Count(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: Count) -> Count:
        return Count(self.drafted - other.drafted, self.accepted - other.accepted)


def expected(folder: Path, prompt: Sequence[int], num_tokens: int, **sizes: int | None) -> Count:
    """What greedy decoding of `num_tokens` with guesses comes to."""
    return counted(folder, prompt, oracle(folder, [prompt], num_tokens)[0], **sizes)


def counted(
    folder: Path,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    num_guesses: int = 1,
    num_first: int | None = None,
) -> Count:
    """What guesses for an answer come to, of a draft that sees the whole sequence at once.

    `num_first` is how many there are for the second token and those after it, if not as many as later.
    """
    tokens = [*prompt, *answer]
    x = reference(folder).inputs(tokens)
    num_drafted = num_accepted = 0
    last, num_left = len(prompt), len(answer) - 1
    while num_left > 0:
        num_made = num_guesses if num_first is None or last > len(prompt) else num_first
        guessed = chain(folder, x[:, :last], min(num_made, num_left - 1))
        pairs = zip(guessed, tokens[last + 1 :], strict=False)
        num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_drafted += len(guessed)
        num_accepted += num_right
        last += 1 + num_right
        num_left -= 1 + num_right
    return Count(num_drafted, num_accepted)


def guesses(folder: Path, tokens: Sequence[int]) -> list[int]:
    """What the draft guesses from each token but the last."""
    draft = reference(folder)
    return draft.likeliest(draft.rows(draft.inputs(tokens)))


def chain(folder: Path, x: torch.Tensor, num_guesses: int) -> list[int]:
    """What the draft guesses behind the last of its inputs, and from its own rows and guesses then."""
    draft, found = reference(folder), list[int]()
    for _ in range(num_guesses):
        row = draft.rows(x)[:, -1:]
        found += draft.likeliest(row)
        x = torch.cat((x, draft.joined(found[-1:], row)), dim=1)
    return found


class Reference(Protocol):
    """A draft over a whole sequence, by plain torch and the layers of `transformers`."""

    def inputs(self, tokens: Sequence[int]) -> torch.Tensor:
        """(1, tokens but the last, hidden): the inputs of its layer, of the model's rows."""

    def joined(self, following: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """The inputs of its layer, of normed rows and the tokens that follow them."""

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Its layer's normed rows, the first at position 0."""

    def likeliest(self, rows: torch.Tensor) -> list[int]:
        """What it guesses from each of its normed rows."""


@cache
def reference(folder: Path) -> Reference:
    return GatedReference(folder) if folder.name.endswith("-mtp") else LatentReference(folder)


class LatentReference:
    """Of DeepSeek-V3 and V3.2: the draft's layer is the last of a model that is one layer longer."""

    def __init__(self, folder: Path) -> None:
        self.model, self.draft, self.weights = _models(str(folder))

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"model.layers.{NUM_LAYERS}.{name}.weight"]
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.joined(tokens[1:], self.model.model(torch.tensor([tokens])).last_hidden_state[:, :-1])

    @torch.inference_mode()
    def joined(self, following: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor([following]))
        both = torch.cat((self.normed("enorm", embedded), self.normed("hnorm", hidden)), dim=-1)
        return both @ self.weights[f"model.layers.{NUM_LAYERS}.eh_proj.weight"].T

    @torch.inference_mode()
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        x = self.draft.model.layers[NUM_LAYERS](
            x,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self.draft.model.rotary_emb(x, places),
        )
        return self.normed("shared_head.norm", x)

    @torch.inference_mode()
    def likeliest(self, rows: torch.Tensor) -> list[int]:
        return self.model.lm_head(rows)[0].argmax(dim=-1).tolist()


class GatedReference:
    """Of Qwen3-Next and Qwen3.5, from the weights alone: gated attention, then a mixture or an MLP."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, **options
        ).eval()
        self.config = json.loads((folder / "config.json").read_text())
        found = load_file(folder / "model.safetensors")
        self.weights = {
            name.removeprefix("mtp.").removesuffix(".weight"): tensor
            for name, tensor in found.items()
            if name.startswith("mtp.")
        }

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weights[name])

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"layers.0.{name}"].T

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.joined(tokens[1:], self.model.model(torch.tensor([tokens])).last_hidden_state[:, :-1])

    @torch.inference_mode()
    def joined(self, following: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor([following]))
        parts = self.normed("pre_fc_norm_embedding", embedded), self.normed("pre_fc_norm_hidden", hidden)
        return torch.cat(parts, dim=-1) @ self.weights["fc"].T

    @torch.inference_mode()
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        x = x[0]
        x = x + self.attention(self.normed("layers.0.input_layernorm", x))
        x = x + self.mlp(self.normed("layers.0.post_attention_layernorm", x))
        return self.normed("norm", x)[None]

    @torch.inference_mode()
    def likeliest(self, rows: torch.Tensor) -> list[int]:
        return self.model.lm_head(rows)[0].argmax(dim=-1).tolist()

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        num_heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q, gate = self.linear("self_attn.q_proj", x).view(len(x), num_heads, 2 * dim).split(dim, dim=-1)
        k, v = (self.linear(f"self_attn.{name}_proj", x).view(len(x), -1, dim) for name in "kv")
        q, k = (self.turned(self.normed(f"layers.0.self_attn.{n}_norm", y)) for n, y in (("q", q), ("k", k)))
        k, v = (y.repeat_interleave(num_heads // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        scores += torch.full((len(x), len(x)), float("-inf")).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v) * gate.sigmoid()
        return self.linear("self_attn.o_proj", mixed.flatten(1))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """The first channels of (tokens, heads, channels), in halves, by position."""
        rope = self.config["rope_parameters"]
        dim = int(x.shape[-1] * rope["partial_rotary_factor"])
        rates = rope["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (torch.arange(len(x))[:, None] * rates)[:, None]
        (a, b), rest = x[..., :dim].chunk(2, dim=-1), x[..., dim:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        def expert(name: str, rows: torch.Tensor) -> torch.Tensor:
            gate, up = (self.linear(f"{name}.{part}_proj", rows) for part in ("gate", "up"))
            return self.linear(f"{name}.down_proj", torch.nn.functional.silu(gate) * up)

        if "layers.0.mlp.gate" not in self.weights:
            return expert("mlp", x)
        shares = self.linear("mlp.gate", x).softmax(dim=-1)
        weights, chosen = shares.topk(self.config["num_experts_per_tok"], dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.linear("mlp.shared_expert_gate", x).sigmoid() * expert("mlp.shared_expert", x)
        for row in range(len(x)):
            for weight, index in zip(weights[row], chosen[row].tolist(), strict=True):
                out[row] += weight * expert(f"mlp.experts.{index}", x[row])
        return out


@cache
def _models(folder: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The model, the same with its draft's layer as a further one, and the weights of both."""
    path = Path(folder)
    weights = load_file(path / "model.safetensors")
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    logging.set_verbosity_error()  # tensors of the draft are not the model's
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    longer = path.with_name(f"{path.name}-whole")
    if not (longer / "config.json").is_file():
        longer.mkdir(exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        for name in ("mlp_layer_types", "layer_types", "indexer_types"):
            if config.get(name):
                config[name] = [*config[name], config[name][-1]]
        config["num_hidden_layers"] = NUM_LAYERS + 1
        save_file(weights, longer / "model.safetensors", {"format": "pt"})
        (longer / "config.json").write_text(json.dumps(config))
    draft = AutoModelForCausalLM.from_pretrained(str(longer), local_files_only=True, **options)
    return model.eval(), draft.eval(), weights
