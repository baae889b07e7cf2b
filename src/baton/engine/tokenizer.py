"""The tokenizer of a model, as the engine uses it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import jinja2

from baton.engine.grammar import Grammars
from baton.engine.sampling_params import SamplingParams, ends_with
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
        self.special = {
            token: str(added_token.content) for token, added_token in added.items() if added_token.special
        }
        """The special tokens, with their spellings."""
        self._has_text: dict[int, bool] = {}
        self._bytes: dict[int, int | None] = {}
        self._grammars: Grammars | None = None

    def serialize(self) -> str:
        """As in tokenizer.json; empty for one that is not of the tokenizers library."""
        fast = getattr(self._backend, "backend_tokenizer", None)
        return "" if fast is None else str(fast.to_str())

    def check_grammar(self, grammar: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        """Raises ConfigError, with the problem, on a grammar that no answer of the model can be held to."""
        if self._grammars is None:
            self._grammars = Grammars(self.serialize(), vocab_size, eos_ids)
        self._grammars.check(grammar)

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
            raise ConfigError(f"the chat template refuses the messages: {error}; change them") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special=False)

    def decode(self, tokens: Sequence[int], has_special: bool = False) -> str:
        """The text of tokens, special ones left out unless asked for, spaces left as they are."""
        text = self._backend.decode(
            [token for token in tokens if self.has_text(token) or (has_special and token in self.special)],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def has_text(self, token: int) -> bool:
        """Whether a token takes part in text: special ones and ids that a padded vocabulary adds do not."""
        known = self._has_text.get(token)
        if known is None:
            known = token not in self.special and bool(self._backend.convert_ids_to_tokens(token))
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


# Text as tokens come, each piece once it is certain.
#
# Theory. The text of a token depends on its neighbours: a character may be spread over up to four tokens,
# and some tokenizers drop the space before the first word. So a window of the latest tokens is decoded at
# each push, and what exceeds the text given out already is new. Bytes at the end that may still become a
# character decode to one U+FFFD, so if the text ends in one it is held back. Whatever comes before it stays
# as it is, whichever token follows.
#
# The window is cut when it has grown, which makes the work linear in the number of tokens. Decoding that
# starts in the middle of a character is off by that character at most, and in step again after three bytes.
# Every token of the window has at least one byte, so a few tokens before the open end are enough for it to
# decode the same; and that it does is looked at before cutting.
#
# Tokenizers that fall back to bytes (SentencePiece) decode a run of byte tokens as a whole: one bad or
# missing byte spoils all characters of the run. These bytes are therefore decoded here, one by one, and the
# window has a letter in their place. Text that is no UTF-8 then has fewer U+FFFD than decoding the whole
# would give, and keeps its good characters; this is the one case in which the pieces do not add up to the
# text of the whole.


_BROKEN = "\ufffd"
_NUM_CONTEXT = 16
_NUM_WINDOW_MAX = 32
_NUM_BROKEN_MAX = 3
"""Characters that the rest of one that was cut apart decodes to, at most."""


class Detokenizer:
    """The text of one sequence; `context` comes before it (the end of the prompt) and gives no text.

    Of special tokens only those in `shown` have text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), shown: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_in_bytes = False
        # From the end on: a long prompt is not read whole for a few tokens.
        before = list(islice(filter(self._has_text, reversed(context)), _NUM_CONTEXT))[::-1]
        self._window = [token if tokenizer.byte_of(token) is None else self._letter() for token in before]
        self._num_given = len(self._decode(self._window))

    def push(self, token: int) -> str:
        """What became certain with this token; often nothing."""
        if not self._has_text(token):
            return ""
        byte = self._tokenizer.byte_of(token)
        if byte is None:
            return self._end_bytes() + self._push_piece(token)
        piece = "" if self._is_in_bytes else self._begin_bytes()
        return piece + self._utf8.decode(bytes([byte]))

    def finish(self) -> str:
        """What was held back, as it stands; the sequence is over."""
        return self._end_bytes() + self._rest()

    def _push_piece(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        num_certain = max(self._num_given, len(text) - text.endswith(_BROKEN))
        piece = text[self._num_given : num_certain]
        self._num_given = num_certain
        if len(self._window) > _NUM_WINDOW_MAX:
            self._cut(text)
        return piece

    def _begin_bytes(self) -> str:
        piece = self._rest()
        self._window.append(self._letter())
        self._num_given = len(self._decode(self._window))
        self._is_in_bytes = True
        return piece

    def _end_bytes(self) -> str:
        self._is_in_bytes = False
        return self._utf8.decode(b"", final=True)

    def _rest(self) -> str:
        piece = self._decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _has_text(self, token: int) -> bool:
        return token in self._shown or self._tokenizer.has_text(token)

    def _decode(self, window: Sequence[int]) -> str:
        # The window has no special tokens but those that are shown.
        return self._tokenizer.decode(window, has_special=bool(self._shown))

    def _letter(self) -> int:
        return self._tokenizer.token_of(ord("a"))

    def _cut(self, text: str) -> None:
        window = self._window[-_NUM_CONTEXT:]
        context = self._decode(window)
        num_open = len(text) - self._num_given
        in_step = context[_NUM_BROKEN_MAX:]
        if len(in_step) > num_open and text.endswith(in_step):
            self._window = window
            self._num_given = len(context) - num_open


# Finds stop strings in text that comes in pieces.
#
# Each stop string is a small automaton (Knuth, Morris and Pratt): its state is how many of its first
# characters the text ends with. The largest state is how much text has to be held back, and the first
# character that completes a stop string ends the text; where it completes several the longest counts. So
# neither depends on how the text was cut into pieces, and the work is linear in the text.


class _Automaton:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_fallback", "_text", "state")

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = [0] * len(text)
        self.state = 0
        for place in range(1, len(text)):
            self._fallback[place] = self._next(self._fallback[place - 1], text[place])

    @property
    def is_complete(self) -> bool:
        return self.state == len(self._text)

    def step(self, character: str) -> None:
        self.state = self._next(self.state, character)

    def _next(self, state: int, character: str) -> int:
        while state and self._text[state] != character:
            state = self._fallback[state - 1]
        return state + (self._text[state] == character)


class StopStrings:
    """Passes text on up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string; nothing once one was found."""
        if self.is_found:
            return ""
        if not self._automata:
            return piece
        text = self._held + piece
        for place, character in enumerate(piece, start=len(self._held)):
            for automaton in self._automata:
                automaton.step(character)
            completed = [automaton.state for automaton in self._automata if automaton.is_complete]
            if completed:
                self.is_found = True
                self._held = ""
                return text[: place + 1 - max(completed)]
        num_certain = len(text) - max(automaton.state for automaton in self._automata)
        self._held = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


# The text of an answer as its caller sees it.


class AnswerText:
    """Text of one answer, up to its stop string or the token that ended it, neither of which it shows.

    The text of the first min_tokens tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_ids: Collection[int],
        context: Sequence[int] = (),
    ) -> None:
        shown = params.shown_special_ids if params.skip_special_tokens else tokenizer.special
        self._detokenizer = Detokenizer(tokenizer, context, shown)
        self._stops = StopStrings(params.stop)
        self._params = params
        self._eos_ids = eos_ids
        self._num_tokens = 0

    @property
    def has_stop_string(self) -> bool:
        """Whether a stop string was found: the answer is over."""
        return self._stops.is_found

    def push(self, token: int) -> str:
        """The text that is certain after this token."""
        self._num_tokens += 1
        if ends_with(token, self._num_tokens, self._params, self._eos_ids):
            return ""
        piece = self._detokenizer.push(token)
        if self._num_tokens <= self._params.min_tokens:
            return piece
        return self._stops.push(piece)

    def finish(self) -> str:
        """The rest of the text, when the answer is over."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
