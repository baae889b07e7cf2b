"""Tiny models for commands, with a tokenizer and without."""

from pathlib import Path

from tests.engine.text.vocabularies import byte_level
from tests.engine.tiny import tiny

from baton.engine.tokenizer import Tokenizer

NUM_IDS = 432
"""A vocabulary that is padded, as those of real models are."""


def speaking_model(folder: Path) -> Path:
    """A checkpoint with a byte-level tokenizer and a chat template."""
    where = tiny("llama", folder, vocab_size=NUM_IDS, eos_token_id=0, bos_token_id=None)
    byte_level().save_pretrained(where)
    return where


def text_of(tokens: list[int]) -> str:
    """What an answer of these tokens says, up to the end that the model chose."""
    stop = tokens.index(0) if 0 in tokens else len(tokens)
    return Tokenizer(byte_level()).decode(tokens[:stop])


def chat_ids(text: str) -> list[int]:
    """A user's message as the template has it."""
    return Tokenizer(byte_level()).chat([{"role": "user", "content": text}])
