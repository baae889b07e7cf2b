"""Text as tokens come, each piece once it is certain.

Theory. The text of a token depends on its neighbours: a character may be spread over up to four tokens, and
some tokenizers drop the space before the first word. So a window of the latest tokens is decoded at each
push, and what exceeds the text given out already is new. Bytes at the end that may still become a character
decode to one U+FFFD, so if the text ends in one it is held back. Whatever comes before it stays as it is,
whichever token follows.

The window is cut when it has grown, which makes the work linear in the number of tokens. Decoding that starts
in the middle of a character is off by that character at most, and in step again after three bytes. Every
token of the window has at least one byte, so a few tokens before the open end are enough for it to decode the
same; and that it does is looked at before cutting.

Tokenizers that fall back to bytes (SentencePiece) decode a run of byte tokens as a whole: one bad or missing
byte spoils all characters of the run. These bytes are therefore decoded here, one by one, and the window has
a letter in their place. Text that is no UTF-8 then has fewer U+FFFD than decoding the whole would give, and
keeps its good characters; this is the one case in which the pieces do not add up to the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice

from baton.engine.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_NUM_CONTEXT = 16
_NUM_WINDOW_MAX = 32
_NUM_BROKEN_MAX = 3
"""Characters that the rest of one that was cut apart decodes to, at most."""


class Detokenizer:
    """The text of one sequence; `context` comes before it (the end of the prompt) and gives no text."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_in_bytes = False
        # From the end on: a long prompt is not read whole for a few tokens.
        before = list(islice(filter(tokenizer.has_text, reversed(context)), _NUM_CONTEXT))[::-1]
        self._window = [token if tokenizer.byte_of(token) is None else self._letter() for token in before]
        self._num_given = len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """What became certain with this token; often nothing."""
        if not self._tokenizer.has_text(token):
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
        text = self._tokenizer.decode(self._window)
        num_certain = max(self._num_given, len(text) - text.endswith(_BROKEN))
        piece = text[self._num_given : num_certain]
        self._num_given = num_certain
        if len(self._window) > _NUM_WINDOW_MAX:
            self._cut(text)
        return piece

    def _begin_bytes(self) -> str:
        piece = self._rest()
        self._window.append(self._letter())
        self._num_given = len(self._tokenizer.decode(self._window))
        self._is_in_bytes = True
        return piece

    def _end_bytes(self) -> str:
        self._is_in_bytes = False
        return self._utf8.decode(b"", final=True)

    def _rest(self) -> str:
        piece = self._tokenizer.decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _letter(self) -> int:
        return self._tokenizer.token_of(ord("a"))

    def _cut(self, text: str) -> None:
        window = self._window[-_NUM_CONTEXT:]
        context = self._tokenizer.decode(window)
        num_open = len(text) - self._num_given
        in_step = context[_NUM_BROKEN_MAX:]
        if len(in_step) > num_open and text.endswith(in_step):
            self._window = window
            self._num_given = len(context) - num_open
