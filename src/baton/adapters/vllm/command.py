"""A vLLM command line as a layout and a storage, for `baton plan`; vLLM itself is not needed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import ConfigError

BLOCK_TOKENS = 16
"""vLLM's default on a GPU."""
DTYPES = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "half": "fp16",
    "float16": "fp16",
    "float": "fp32",
    "float32": "fp32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
_NAMES = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
}
_READ = (
    *_NAMES.values(),
    "model",
    "block-size",
    "dtype",
    "kv-cache-dtype",
)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """What a plan needs of `vllm serve MODEL OPTIONS`; other options change nothing about it."""

    model: str
    tp: int
    pp: int
    block_tokens: int
    dtype: str
    """Of the KV cache."""

    def layout(self, num_layers: int) -> str:
        """The layout of one engine; layers that cannot be divided evenly lie where vLLM puts them."""
        if self.pp > num_layers:
            raise ConfigError(f"{self.pp} pipeline stages for {num_layers} layers; use at most {num_layers}")
        sizes = [num_layers // self.pp] * self.pp
        # From the last stage but one backwards.
        for stage in range(2, num_layers % self.pp + 2):
            sizes[-stage] += 1
        stages = f"pp{self.pp}:{'-'.join(map(str, sizes))}." if self.pp > 1 else ""
        return f"{stages}tp{self.tp}"

    @property
    def storage(self) -> str:
        """K and V of a block side by side, heads outside of tokens; what is inside a block is not cut."""
        return f"hnd.fused.layer.granule{self.block_tokens}"


def parse_command(text: str) -> VllmCommand:
    """Reads `[vllm] [serve] MODEL OPTIONS`; raises ConfigError on values that no hand-over has."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"vLLM command {text!r}: {error}") from None
    for word in ("vllm", "serve"):
        if words[:1] == [word]:
            words = words[1:]
    options = dict(_options(words))
    model = options.get("model") or (words[0] if words and not words[0].startswith("-") else "")
    for name in ("decode-context-parallel-size", "prefill-context-parallel-size"):
        if _number(options, name, 1) > 1:
            raise ConfigError(f"vLLM command: --{name} {options[name]} cannot be handed over yet; use 1")
    dtype = options.get("kv-cache-dtype", "auto")
    if dtype == "auto":
        dtype = options.get("dtype", "auto")
    if dtype not in DTYPES:
        raise ConfigError(f"vLLM command: dtype {dtype!r} is not known here; use one of {', '.join(DTYPES)}")
    return VllmCommand(
        model=model,
        tp=_number(options, "tensor-parallel-size", 1),
        pp=_number(options, "pipeline-parallel-size", 1),
        block_tokens=_number(options, "block-size", BLOCK_TOKENS),
        dtype=DTYPES[dtype],
    )


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """The options that are read here, `--name value` or `--name=value`; the last of a name counts."""
    for place, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, has_value, value = word.partition("=")
        name = _NAMES.get(name, name.removeprefix("--").replace("_", "-"))
        if name not in _READ:
            continue
        if not has_value:
            if place + 1 == len(words):
                raise ConfigError(f"vLLM command: {word} has no value; give one")
            value = words[place + 1]
        yield name, value


def _number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1 << 20):
        raise ConfigError(f"vLLM command: --{name} is {text!r}; give a whole number from 1")
    return int(text)
