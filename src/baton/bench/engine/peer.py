"""The model of a checkpoint in `transformers`, with the weights that the engine reads."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from baton.engine.attention.pools import DTYPES
from baton.engine.checkpoint import Checkpoint, open_checkpoint
from baton.errors import ConfigError


class Peer:
    """One model; prompts go through it one at a time."""

    def __init__(self, model: str, dtype: str, device: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        self._model = _load(open_checkpoint(model), DTYPES[dtype]).to(self._device).eval()
        # Generation goes on past eos: what is timed is the model.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> int:
        """The token after a prompt."""
        ids = torch.tensor([tokens], device=self._device)
        logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    @torch.inference_mode()
    def generate(self, tokens: list[int], num_tokens: int) -> list[int]:
        """So many tokens after a prompt, greedily, by its own loop."""
        ids = torch.tensor([tokens], device=self._device)
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        answer: list[int] = found[0, len(tokens) :].tolist()
        return answer


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    config = {key: value for key, value in checkpoint.config.items() if key != "baton"}
    config.pop("quantization_config", None)
    filled = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    # No initial weights: every one is read.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(filled, dtype=dtype)
    weights = {name: checkpoint.read(name, dtype=dtype) for name in checkpoint.names()}
    absent = set(model.load_state_dict(weights, strict=False, assign=True).missing_keys)
    if filled.tie_word_embeddings:
        absent.discard("lm_head.weight")
        model.tie_weights()
    if absent:
        raise ConfigError(f"{checkpoint.title} has no {sorted(absent)[0]}, which transformers asks for")
    _fill_buffers(model, filled)
    return model


def _fill_buffers(model: Any, config: Any) -> None:
    """Rotary frequencies are no weights of a checkpoint: each module makes its own again, off `meta`."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, type(module)(config))
