"""Tiny checkpoints with a draft layer, and what such a draft guesses by the layers of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.tiny import FAMILIES, oracle, tiny
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


@dataclass(frozen=True)
class Count:
    """How often a draft guessed, and was right."""

    drafted: int
    accepted: int

    def __add__(self, other: Count) -> Count:
        return Count(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: Count) -> Count:
        return Count(self.drafted - other.drafted, self.accepted - other.accepted)


def expected(folder: Path, prompt: Sequence[int], num_tokens: int) -> Count:
    """What greedy decoding of `num_tokens` with guesses comes to."""
    return counted(folder, prompt, oracle(folder, [prompt], num_tokens)[0])


def counted(folder: Path, prompt: Sequence[int], answer: Sequence[int], *, has_first: bool = True) -> Count:
    """What guesses for an answer come to, of a draft that sees the whole sequence at once.

    Without `has_first` there is none for the second token.
    """
    tokens = [*prompt, *answer]
    found = guesses(folder, tokens)
    num_drafted = num_accepted = 0
    last, num_left = len(prompt), len(answer) - 1
    while num_left > 0:
        num_steps = 1
        if num_left > 1 and (has_first or last > len(prompt)):
            num_drafted += 1
            # Row t guesses token t + 2.
            num_steps += found[last - 1] == tokens[last + 1]
            num_accepted += num_steps - 1
        last += num_steps
        num_left -= num_steps
    return Count(num_drafted, num_accepted)


def guesses(folder: Path, tokens: Sequence[int]) -> list[int]:
    """What the draft guesses from each token but the last, by the layers of `transformers`."""
    model, draft, weights = _models(str(folder))
    prefix, eps = f"model.layers.{NUM_LAYERS}", model.config.rms_norm_eps
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        hidden = model.model(ids).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(ids[:, 1:])

        def normed(name: str, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[f"{prefix}.{name}.weight"], eps)

        both = torch.cat((normed("enorm", embedded), normed("hnorm", hidden)), dim=-1)
        x = both @ weights[f"{prefix}.eh_proj.weight"].T
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        x = draft.model.layers[NUM_LAYERS](
            x,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=draft.model.rotary_emb(x, places),
        )
        logits = model.lm_head(normed("shared_head.norm", x))
    return logits[0].argmax(dim=-1).tolist()


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
