"""What a server knows of the model behind it, and how prompts become token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.engine.instance import Instance
from baton.engine.tokenizer import Tokenizer
from baton.errors import ConfigError
from baton.web.problems import Problem, refused

T = TypeVar("T")

TOO_LONG = "context_length_exceeded"
_INLINE_CHARACTERS_MAX = 2000
"""Longer texts are cut into tokens on a thread of their own: the loop has streams to serve."""
_TOKEN_CHARACTERS_MAX = 256
"""No token is longer: a text of more than so many times the context needs no counting."""
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template stumbles over when messages are not as it expects."""


@dataclass(frozen=True, slots=True)
class Model:
    """A running instance's model."""

    tokenizer: Tokenizer | None
    context_max: int
    vocab_size: int
    room_for: Callable[[int], int]
    """Prompt and answer together, at most, for a prompt of so many tokens."""

    @staticmethod
    def of(instance: Instance) -> Model:
        """The model of an instance."""
        sizes = instance.sizes
        vocab_size = sizes.architecture.vocab_size
        return Model(instance.tokenizer, sizes.context_max, vocab_size, instance.core.num_tokens_max)

    async def encode(self, text: str, param: str) -> tuple[int, ...]:
        """Token ids of a text."""
        tokenizer = self._tokenizer(param)
        self._check_characters(len(text), param)
        return tuple(await _off_loop(lambda: tokenizer.encode(text), len(text)))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Token ids of a chat by the model's template; `options` are what else the template is given."""
        tokenizer = self._tokenizer("messages")
        if not tokenizer.has_chat_template:
            text = "the model has no chat template; send the prompt to /v1/completions"
            raise Problem(400, text, param="messages", code="unsupported")
        if options.get("tools") and not tokenizer.has_template_word("tools"):
            raise refused("tools", options["tools"], "the model's chat template takes none; leave them out")
        num_characters = sum(len(str(message.get("content", ""))) for message in messages)
        self._check_characters(num_characters, "messages")
        rest = dict(options)
        is_open = bool(rest.pop("add_generation_prompt", True))
        try:
            return tuple(await _off_loop(lambda: tokenizer.chat(messages, is_open, rest), num_characters))
        except ConfigError as error:
            raise Problem(400, str(error), param="messages") from None
        except _TEMPLATE_ERRORS as error:
            text = f"the chat template cannot use the messages ({type(error).__name__}: {error}); mend them"
            raise Problem(400, text, param="messages") from None

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    def check_ids(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Token ids as a client sent them."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise refused(param, wrong, f"give token ids from 0 to {self.vocab_size - 1}")
        return tuple(tokens)

    def _tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            text = f"{param}: the model has no tokenizer; send token ids to /v1/completions"
            raise Problem(400, text, param=param, code="unsupported")
        return self.tokenizer

    def _check_characters(self, num_characters: int, param: str) -> None:
        if num_characters > _TOKEN_CHARACTERS_MAX * self.context_max:
            text = f"{param} has {num_characters} characters, far more than the {self.context_max} tokens "
            raise Problem(400, f"{text}of the context; send less", param=param, code=TOO_LONG)


async def _off_loop(work: Callable[[], T], num_characters: int) -> T:
    return work() if num_characters <= _INLINE_CHARACTERS_MAX else await asyncio.to_thread(work)
