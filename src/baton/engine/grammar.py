"""Structured outputs: the format of an answer as a grammar, and the tokens that keep to it.

A grammar is a text in llguidance's Lark dialect, one of the sampling parameters. A matcher's state follows
from the grammar and the answer's tokens, so any instance can continue any answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from baton.errors import ConfigError

# With forcing, llguidance tokenizes text that must follow, and takes the spelling of a special token (of eos,
# say, in an enum) for the token itself.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# White space is bounded because a model that is undecided writes it until max_tokens; keywords that
# llguidance does not know are errors, whatever the schema says.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}", "lenient": False}
_PROBLEM_CHARACTERS_MAX = 300
_NUM_CHECKED = 256


def json_grammar(schema: object) -> str:
    """JSON that satisfies a schema."""
    return f"start: {_json_rule(schema)}{_OPTIONS}"


def regex_grammar(regex: str) -> str:
    """Text that a regular expression matches as a whole."""
    return f"start: /{llguidance.regex_to_lark(regex)}/{_OPTIONS}"


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    return f"start: {' | '.join(map(_quoted, choices))}{_OPTIONS}"


def text_grammar(text: str) -> str:
    """A grammar that a client wrote, in Lark or GBNF."""
    try:
        lark = llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise ConfigError(f"{error}; write it in Lark or GBNF") from None
    return f"{lark}{_OPTIONS}"


def call_grammar(
    functions: Mapping[str, object], key: str, begin: str | int, end: str | int, *, is_parallel: bool
) -> str:
    """A call of one of these functions, by name the schema of its arguments; `is_parallel`: or several calls.

    A call is an object with the function's name and, under this key, its arguments. The tags around it are
    text, or a token that is spelled like it; without tags there is a semicolon between calls.
    """
    tags = [f"<[{tag}]>" if isinstance(tag, int) else _quoted(tag) for tag in (begin, end)]
    before, after = (f'{tags[0]} "\\n"', f'"\\n" {tags[1]}') if begin else ("", "")
    lines = [
        f"start: call ({_quoted(chr(10) if begin else '; ')} call)*" if is_parallel else "start: call",
        f"call: {before} ({' | '.join(f'call_{index}' for index in range(len(functions)))}) {after}",
    ]
    for index, (name, schema) in enumerate(functions.items()):
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        lines.append(f'call_{index}: {_quoted(head)} arguments_{index} "}}"')
        # A rule of its own: references in a schema count from its root.
        lines.append(f"arguments_{index}: {_json_rule(schema)}")
    return "\n".join(lines) + _OPTIONS


def _json_rule(schema: object) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Grammars:
    """Grammars over the tokens of one model.

    Making it holds Python's lock for a second where the vocabulary is large.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`tokenizer` is serialized, as in tokenizer.json."""
        if not tokenizer:
            raise ConfigError("the model has no tokenizer of the tokenizers library")
        if not eos_ids:
            raise ConfigError("the model has no token that ends an answer")
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        try:
            self._tokenizer = LLTokenizer(tokenizer, eos_token=self._eos_ids[0])
        except ValueError as error:
            raise ConfigError(f"llguidance cannot read the model's tokenizer: {error}") from None
        self.check = lru_cache(_NUM_CHECKED)(self._check)
        """Raises ConfigError, with the grammar's problem, on one that cannot be used."""

    def _check(self, grammar: str) -> None:
        if problem := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise ConfigError(_in_short(problem))

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of an answer."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        return Matcher(matcher, self._vocab_size, self._eos_ids)


class Matcher:
    """One answer, as far as it has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: list[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.failure = ""
        """Why the answer cannot continue, once it cannot."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in tokens of the answer."""
        # An eos may be followed by draft tokens, which nobody will see.
        self._matcher.consume_tokens([token for token in tokens if token not in self._eos_ids])

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next; all of them where it has failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[: len(known)] = known
        allowed[self._eos_ids] = self._matcher.is_accepting()
        if self._matcher.is_error():
            self.failure = _in_short(self._matcher.get_error())
        elif not allowed.any():
            self.failure = "no token of the vocabulary can follow"
        return np.ones_like(allowed) if self.failure else allowed


def _in_short(problem: str) -> str:
    """llguidance's message without the dump of its state and of the grammar."""
    text = problem.rsplit("failed to compile JSON schema: ", maxsplit=1)[-1]
    text = re.split(r"\n<state>|\n +\d+ \| ", text)[0]
    return " ".join(text.split())[:_PROBLEM_CHARACTERS_MAX]
