"""A checkpoint's tokenizer and chat template, and the tokens that end an answer. Nothing is ever fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.checkpoint.base import Checkpoint
from baton.checkpoint.gguf import GgufFile
from baton.errors import ConfigError

_MODEL = "tokenizer.ggml.model"
_BYTES = "gpt2"
_PIECES = "llama"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_ONE_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies with the weights, or None: then requests are token ids."""
    if isinstance(checkpoint, GgufFile):
        return _of_gguf(checkpoint)
    if checkpoint.path is None or not any((checkpoint.path / name).is_file() for name in _FILES):
        return None
    return _of_folder(checkpoint.path, **_stated_class(checkpoint))


def _stated_class(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the tokenizer names its class, only the name of the model's type is needed to load it.

    Otherwise `transformers` reads the model's config, and imports its modeling code and the compiler of
    PyTorch for that: 2 to 3 s of a core.
    """
    assert checkpoint.path is not None
    try:
        stated = json.loads((checkpoint.path / _SETTINGS).read_bytes())
    except (OSError, ValueError):
        return {}
    if (
        not isinstance(stated, dict)
        or "auto_map" in stated
        or not isinstance(stated.get("tokenizer_class"), str)
    ):
        return {}
    config = PreTrainedConfig()
    config.name_or_path = str(checkpoint.path)
    for name in ("model_type", "model_name"):
        if name in checkpoint.config:
            setattr(config, name, checkpoint.config[name])
    return {"config": config}


def eos_ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token that ends an answer: of generation_config.json, else the config, and the tokenizer's."""
    stated = checkpoint.generation_config.get("eos_token_id")
    if stated is None:
        stated = checkpoint.config.get("eos_token_id")
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return tuple(dict.fromkeys((*_ids(stated), *_ids(own))))


def _ids(stated: object) -> Iterable[int]:
    if isinstance(stated, int):
        return (stated,)
    return tuple(token for token in stated if isinstance(token, int)) if isinstance(stated, list) else ()


def _of_folder(folder: Path, **more: Any) -> PreTrainedTokenizerBase:
    try:
        backend: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **more
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as cause:
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise ConfigError(
            f"folder {folder}: its tokenizer cannot be loaded ({reason}); fetch the tokenizer's files again"
        ) from None
    return backend


def _of_gguf(checkpoint: GgufFile) -> PreTrainedTokenizerBase | None:
    """A tokenizer.json beside the file goes before what the file itself says."""
    folder = checkpoint.path.parent
    if (folder / _ONE_FILE).is_file():
        return _of_folder(folder)
    metadata = checkpoint.header.metadata
    kind = metadata.get(_MODEL)
    if kind in (None, "none", "no_vocab"):
        return None
    if kind == _BYTES:
        return byte_tokenizer(metadata, str(checkpoint.path))
    if kind == _PIECES:
        return _of_pieces(checkpoint)
    raise ConfigError(
        f"{checkpoint.path}: tokenizer of kind {kind!r} is not supported; "
        f"put the model's {_ONE_FILE} beside it"
    )


def _of_pieces(checkpoint: GgufFile) -> PreTrainedTokenizerBase:
    """`transformers` makes the merges out of the scores, and leaves the first token out."""
    backend: Any = _of_folder(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    if checkpoint.header.metadata.get("tokenizer.ggml.add_bos_token", True) and backend.bos_token:
        put_bos_first(backend.backend_tokenizer, backend.bos_token, backend.bos_token_id)
    result: PreTrainedTokenizerBase = backend
    return result


# Byte-level BPE tokenizers out of GGUF metadata.
#
# The file names the way in which text is split before the merges (`tokenizer.ggml.pre`) and leaves the rule
# to its readers; a name that is not known here is refused, since a near miss gives tokens that are nearly
# right.


_CONTROL = 3
_USER_DEFINED = 4
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """What happens to text before the merges."""

    pattern: str | None = None
    """None is the pattern of GPT-2."""
    has_single_digits: bool = False
    is_composed: bool = False
    """Unicode is brought to its composed form first."""
    has_whole_words: bool = False
    """A piece that is in the vocabulary is taken without merging."""
    adds_bos: bool = False
    """Where the file does not say."""


_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(has_single_digits=True),
    "llama-bpe": _Splitting(f"{_WORDS}|\\p{{N}}{{1,3}}|{_REST}", has_whole_words=True, adds_bos=True),
    "qwen2": _Splitting(f"{_WORDS}|\\p{{N}}|{_REST}", is_composed=True),
}


def byte_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata describes, with the file's own chat template."""
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    splitting = _SPLITTINGS.get(keys.get("pre", "gpt-2"))
    if splitting is None:
        raise ConfigError(
            f"{where}: splits text by the rule {keys['pre']!r}, which is not known "
            f"(known are {', '.join(_SPLITTINGS)}); put the model's tokenizer.json beside it"
        )
    tokens = keys["tokens"]
    tokenizer = _merging(tokens, keys.get("merges", []), splitting)
    kinds = keys.get("token_type", [])
    tokenizer.add_tokens(
        [_added(token) for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    )
    tokenizer.add_special_tokens(
        [_added(token) for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    )
    named = {
        f"{name}_token": tokens[keys[f"{key}_token_id"]]
        for key, name in _NAMED.items()
        if f"{key}_token_id" in keys
    }
    if keys.get("add_bos_token", splitting.adds_bos) and "bos_token" in named:
        put_bos_first(tokenizer, named["bos_token"], keys["bos_token_id"])
    make: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def put_bos_first(tokenizer: Tokenizer, bos: str, bos_id: int) -> None:
    """From now on every text begins with that token."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _merging(tokens: list[str], merges: list[str], splitting: _Splitting) -> Tokenizer:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitting.has_whole_words))
    if splitting.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)
