"""Byte-level BPE tokenizers out of GGUF metadata.

The file names the way in which text is split before the merges (`tokenizer.ggml.pre`) and leaves the rule to
its readers; a name that is not known here is refused, since a near miss gives tokens that are nearly right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.errors import ConfigError

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
