"""The tokenizer of a model, as the engine uses it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2

from baton.errors import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Backend(Protocol):
    """What is used of a `transformers` tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens beside the trained vocabulary, by id; each says whether it is special."""

    @property
    def chat_template(self) -> Any:
        """The template that turns messages into text, if the model has one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Token ids to text."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """The token with an id; None where there is none."""

    def convert_tokens_to_ids(self, tokens: str) -> Any:
        """The id of a token."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Messages to text."""


class Tokenizer:
    """Text and chats to token ids, token ids to text."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.added_tokens_decoder
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._has_text: dict[int, bool] = {}
        self._bytes: dict[int, int | None] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be made a prompt."""
        return bool(self._backend.chat_template)

    def has_template_word(self, word: str) -> bool:
        """Whether the chat template mentions a word, as the name of something that it takes."""
        return word in str(self._backend.chat_template)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around a text unless told not to."""
        return list(self._backend.encode(text, add_special_tokens=add_special))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat by the model's template; `options` are what else it knows, as tools."""
        if not self.has_chat_template:
            raise ConfigError("the model has no chat template; send the prompt as text")
        try:
            text = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                **(options or {}),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template refuses the messages: {error}; mend them") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out, spaces left as they are."""
        text = self._backend.decode(
            [token for token in tokens if self.has_text(token)],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def has_text(self, token: int) -> bool:
        """Whether a token takes part in text: special ones and ids that a padded vocabulary adds do not."""
        known = self._has_text.get(token)
        if known is None:
            known = token not in self._special and bool(self._backend.convert_ids_to_tokens(token))
            self._has_text[token] = known
        return known

    def spelling(self, token: int) -> str:
        """A token as its vocabulary has it; empty for ids that have none."""
        return str(self._backend.convert_ids_to_tokens(token) or "")

    def byte_of(self, token: int) -> int | None:
        """The byte that a token stands for, where the tokenizer spells what it has no token for in bytes."""
        if token not in self._bytes:
            piece = self._backend.convert_ids_to_tokens(token)
            match = _BYTE_PIECE.fullmatch(piece) if piece else None
            # Elsewhere a token may be spelled like this and mean just that.
            is_byte = match is not None and self.decode([token]) != piece
            self._bytes[token] = int(match[1], 16) if match and is_byte else None
        return self._bytes[token]

    def token_of(self, byte: int) -> int:
        """The token of a byte, where there are such tokens."""
        return int(self._backend.convert_tokens_to_ids(f"<0x{byte:02X}>"))
