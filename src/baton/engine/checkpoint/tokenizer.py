"""A checkpoint's tokenizer and chat template, and the tokens that end an answer. Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from baton.engine.checkpoint.gguf import GgufFile
from baton.engine.checkpoint.gguf_tokenizer import byte_tokenizer, put_bos_first
from baton.engine.checkpoint.seam import Checkpoint
from baton.errors import ConfigError

_MODEL = "tokenizer.ggml.model"
_BYTES = "gpt2"
_PIECES = "llama"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_ONE_FILE = "tokenizer.json"


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies with the weights, or None: then requests are token ids."""
    if isinstance(checkpoint, GgufFile):
        return _of_gguf(checkpoint)
    if checkpoint.path is None or not any((checkpoint.path / name).is_file() for name in _FILES):
        return None
    return _of_folder(checkpoint.path)


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
    return tuple(each for each in stated if isinstance(each, int)) if isinstance(stated, list) else ()


def _of_folder(folder: Path, **more: Any) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **more
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as cause:
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise ConfigError(
            f"folder {folder}: its tokenizer cannot be loaded ({reason}); fetch the tokenizer's files again"
        ) from None
    return found


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
    found: Any = _of_folder(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    if checkpoint.header.metadata.get("tokenizer.ggml.add_bos_token", True) and found.bos_token:
        put_bos_first(found.backend_tokenizer, found.bos_token, found.bos_token_id)
    result: PreTrainedTokenizerBase = found
    return result
