"""Prefill and decode of the engine beside `transformers`, on the same checkpoint and prompts, in turns."""

from __future__ import annotations

import importlib
import random
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.record import show_picture, write
from baton.checkpoint.base import Checkpoint
from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import DTYPES
from baton.engine.config import EngineConfig
from baton.engine.deployment import Pair, PairRequest
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.sizes import derive_sizes
from baton.errors import ConfigError

PREFILL_TARGET = 1.0
DECODE_TARGET = 3.0
NUM_SHORT = 16
"""Tokens of the prompts whose answers are decoded."""


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """One run of the benchmark."""

    model: str
    dtype: str = "fp32"
    device: str = "cpu"
    num_threads: int = 1
    num_prompt: int = 512
    """Tokens of the prompt that is prefilled."""
    num_decoded: int = 64
    """Tokens of every answer."""
    num_requests: int = 8
    """Decoded at once by the engine, against one in `transformers`."""
    repeats: int = 5

    @property
    def num_steps(self) -> int:
        """How often `run` reports progress."""
        return 2 + 2 * (self.repeats + 1)

    def instance(self) -> EngineConfig:
        """The engine's configuration."""
        context_max = max(self.num_prompt, NUM_SHORT + self.num_decoded) + 16
        return EngineConfig(
            model=self.model,
            name="bench",
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            context_max=context_max,
            pool_tokens=2 * max(context_max, (NUM_SHORT + self.num_decoded + 16) * self.num_requests),
            chunk_tokens=context_max,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of the engine and of `transformers`, round by round."""

    name: str
    target: float
    engine_tokens: int
    peer_tokens: int
    engine_s: list[float]
    peer_s: list[float]

    @property
    def engine_per_s(self) -> float:
        """Median tokens per second of the engine."""
        return self.engine_tokens / median(self.engine_s)

    @property
    def peer_per_s(self) -> float:
        """Median tokens per second of `transformers`."""
        return self.peer_tokens / median(self.peer_s)

    @property
    def ratio(self) -> float:
        """Engine over `transformers`, the median over rounds."""
        scale = self.engine_tokens / self.peer_tokens
        return scale * median(b / a for a, b in zip(self.engine_s, self.peer_s, strict=True))

    def as_json(self) -> dict[str, Any]:
        return {
            "engine_tokens_per_s": self.engine_per_s,
            "transformers_tokens_per_s": self.peer_per_s,
            "ratio": self.ratio,
            "target": self.target,
            "is_met": self.ratio >= self.target,
            "engine_s": self.engine_s,
            "transformers_s": self.peer_s,
        }


@dataclass(frozen=True, slots=True)
class EngineBenchResult:
    """Both comparisons, and how many tokens were the same."""

    prefill: Comparison
    decode: Comparison
    num_tokens: int
    num_identical: int


class TransformersModel:
    """A checkpoint's model in `transformers`, with the weights that the engine reads."""

    def __init__(self, model: str, dtype: str, device: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        self._model = _load(open_checkpoint(model), DTYPES[dtype]).to(self._device).eval()
        # Generation goes on past eos: the model is timed, not the answer.
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
        """Greedy tokens after a prompt."""
        ids = torch.tensor([tokens], device=self._device)
        generated = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        answer: list[int] = generated[0, len(tokens) :].tolist()
        return answer


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")
    config = {key: value for key, value in checkpoint.config.items() if key != "baton"}
    config.pop("quantization_config", None)
    hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):  # every weight is read from the checkpoint
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    weights = {name: checkpoint.read(name, dtype=dtype) for name in checkpoint.names()}
    missing = set(model.load_state_dict(weights, strict=False, assign=True).missing_keys)
    if hf_config.tie_word_embeddings:
        missing.discard("lm_head.weight")
        model.tie_weights()
    if missing:
        raise ConfigError(f"{checkpoint.title} has no {sorted(missing)[0]}, which transformers needs")
    # Rotary frequencies are not in a checkpoint: each such module is made again, off `meta`.
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, type(module)(hf_config))
    return model


def check(options: EngineBenchOptions) -> None:
    """Raises on options that cannot work, before anything is started."""
    derive_sizes(options.instance())


def run(options: EngineBenchOptions, progress: Callable[[str], None]) -> EngineBenchResult:
    """Measures both sides on the same prompts; the first round of each kind warms up and does not count."""
    progress("loading the model into transformers")
    peer = TransformersModel(options.model, options.dtype, options.device, options.num_threads)
    progress("starting the engine")
    rng = random.Random(0)
    num_prompt, num_decoded, num_requests = options.num_prompt, options.num_decoded, options.num_requests
    prefill = Comparison(f"prefill of {num_prompt}", PREFILL_TARGET, num_prompt, num_prompt, [], [])
    name = f"decode, {num_requests} requests against 1"
    decode = Comparison(name, DECODE_TARGET, num_decoded * num_requests, num_decoded, [], [])
    same: list[bool] = []
    with Instance(options.instance()) as instance:
        vocab_size = instance.sizes.architecture.vocab_size
        prompt = [rng.randrange(vocab_size) for _ in range(num_prompt)]
        shorts = [[rng.randrange(vocab_size) for _ in range(NUM_SHORT)] for _ in range(num_requests)]
        for index in range(options.repeats + 1):
            progress(f"prefill, {index} of {options.repeats}")
            (answer,), engine_s = _timed(partial(_answers, instance, [prompt], 1))
            expected, peer_s = _timed(partial(peer.prefill, prompt))
            same.append(answer == [expected])
            _add(prefill, engine_s, peer_s, index)
        for index in range(options.repeats + 1):
            progress(f"decode, {index} of {options.repeats}")
            answers, engine_s = _timed(partial(_answers, instance, shorts, num_decoded))
            at = index % len(shorts)
            expected, peer_s = _timed(partial(peer.generate, shorts[at], num_decoded))
            same += [a == b for a, b in zip(answers[at], expected, strict=True)]
            _add(decode, engine_s, peer_s, index)
    return EngineBenchResult(prefill, decode, len(same), sum(same))


def _add(comparison: Comparison, engine_s: float, peer_s: float, index: int) -> None:
    if index:
        comparison.engine_s.append(engine_s)
        comparison.peer_s.append(peer_s)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start_s = perf_counter()
    result = work()
    return result, perf_counter() - start_s


def _answers(instance: Instance, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The answers to all prompts at once; a salt of its own keeps the prefix cache out."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    pair, salt = Pair(instance), secrets.token_hex(8)
    asked = [
        pair.ask(PairRequest(EngineRequest(tuple(prompt), params, salt=f"{salt} {index}")))
        for index, prompt in enumerate(prompts)
    ]
    return [[sampled.token for chunk in chunks for sampled in chunk.tokens] for _, chunks in asked]


def show(result: EngineBenchResult, options: EngineBenchOptions, path: Path, picture: Path | None) -> None:
    """Prints and writes everything; the last line is the summary."""
    title = f"{options.model}, {options.dtype}, {options.num_threads} threads, tokens per second"
    table = Table("", title=title)
    for head in ("engine", "transformers", "ratio", "target"):
        table.add_column(head, justify="right")
    prefill, decode = result.prefill, result.decode
    for row in (prefill, decode):
        verdict = "met" if row.ratio >= row.target else "missed"
        texts = (f"{row.engine_per_s:.1f}", f"{row.peer_per_s:.1f}", f"{row.ratio:.2f}")
        table.add_row(row.name, *texts, f"{row.target:g}: {verdict}")
    Console().print(table)
    write(
        path,
        {
            "options": asdict(options),
            "torch": torch.__version__,
            "transformers": importlib.import_module("transformers").__version__,
            "prefill": prefill.as_json(),
            "decode": decode.as_json(),
            "tokens_compared": result.num_tokens,
            "tokens_identical": result.num_identical,
        },
    )
    if picture is not None:
        show_picture(picture, lambda pyplot: _paint(pyplot, result))
    print(
        f"prefill {prefill.ratio:.2f} times transformers (target {prefill.target:g}), "
        f"decode of {options.num_requests} {decode.ratio:.2f} times its decode of 1 "
        f"(target {decode.target:g}); tokens identical: {result.num_identical} of {result.num_tokens}"
    )


def _paint(pyplot: Any, result: EngineBenchResult) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(7, 3), layout="constrained")
    for axes, row in zip(panels, (result.prefill, result.decode), strict=True):
        axes.bar(("engine", "transformers"), (row.engine_per_s, row.peer_per_s), width=0.6)
        axes.set_title(f"{row.name}: {row.ratio:.2f} times", fontsize=9, loc="left")
        axes.set_ylabel("tokens per second")
    return figure
