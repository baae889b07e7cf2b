"""How choices are written as responses: one class for each of the three APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import UNSET

from baton.engine.commands import SampledToken
from baton.engine.tokenizer import Tokenizer
from baton.serving.parsing import ParsedRequest
from baton.serving.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    DeltaChoice,
    Generated,
    GenerateMeta,
    TokenLogprob,
    Usage,
)

LOGPROB_MIN = -9999.0
"""In place of minus infinity, which JSON does not have."""
_BROKEN = "\ufffd"


@dataclass(slots=True)
class ChoiceDelta:
    """What a choice gained since the last look at it."""

    index: int
    is_first: bool
    """Whether nothing of the choice was sent before, here or by an earlier attempt."""
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish: str | None = None

    @property
    def ids(self) -> list[int]:
        return [sampled.token for sampled in self.tokens]


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies spell each byte as a printable letter."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenNames:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def name(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, or its spelling where it has none, and its bytes where they are known."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        text = self._tokenizer.decode([token])
        if text and _BROKEN not in text:
            return text, list(text.encode())
        spelling = self._tokenizer.spelling(token)
        byte = self._tokenizer.byte_of(token)
        if byte is not None:
            raw = bytes([byte])
        elif text and all(letter in _LETTERS for letter in spelling):
            raw = bytes(_LETTERS[letter] for letter in spelling)
        else:
            return spelling or f"token_id:{token}", list(spelling.encode()) or None
        # A part of a character has no text of its own.
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


def _top_tokens(sampled: SampledToken, num_top: int) -> list[tuple[int, float]]:
    """The most likely tokens at a position, best first."""
    ranked = sorted(sampled.top.items(), key=lambda item: (-item[1], item[0]))
    return [(token, _finite(logprob)) for token, logprob in ranked[:num_top]]


class ResponseFormat(ABC):
    """Renders one request's choices in the form of its API."""

    def __init__(self, parsed: ParsedRequest, model: str, names: TokenNames) -> None:
        self.parsed = parsed
        self.model = model
        self.names = names

    @property
    def num_top(self) -> int | None:
        """How many alternatives each token gets; None: no log-probabilities at all."""
        return self.parsed.jobs[0].request.params.logprobs

    def is_silent(self, delta: ChoiceDelta) -> bool:
        """Whether a client would see nothing of this delta, so that it can wait for the next one."""
        has_more = delta.finish or delta.is_first or self.num_top is not None or self.parsed.has_ids
        return not delta.text and not has_more

    @abstractmethod
    def event(self, delta: ChoiceDelta) -> msgspec.Struct:
        """A stream event."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> msgspec.Struct | None:
        """The event with the usage, where the API has one."""

    @abstractmethod
    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> object:
        """The response without a stream; each choice is one delta."""


def response_format(parsed: ParsedRequest, model: str, names: TokenNames) -> ResponseFormat:
    match parsed.body:
        case ChatRequest():
            return ChatFormat(parsed, model, names)
        case CompletionRequest():
            return CompletionFormat(parsed, model, names)
        case _:
            return GenerateFormat(parsed, model, names)


class CompletionFormat(ResponseFormat):
    """/v1/completions."""

    def __init__(self, parsed: ParsedRequest, model: str, names: TokenNames) -> None:
        super().__init__(parsed, model, names)
        self._offsets: dict[int, int] = {}
        """By choice: where its next token's text begins."""

    def event(self, delta: ChoiceDelta) -> Completion:
        usage = None if self.parsed.has_usage else UNSET
        return self._completion([self._choice(delta)], usage)

    def usage_event(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> Completion:
        return self._completion([self._choice(delta) for delta in choices], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(self.parsed.id, self.parsed.created, self.model, choices, usage=usage)

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        echo = self.parsed.echoes[delta.index // self.parsed.n] if delta.is_first else ""
        ids = delta.ids if self.parsed.has_ids else UNSET
        return CompletionChoice(delta.index, echo + delta.text, self._logprobs(delta), delta.finish, ids)

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs | None:
        num_top = self.num_top
        if num_top is None:
            return None
        names = [self.names.name(sampled.token)[0] for sampled in delta.tokens]
        tops = [
            {self.names.name(token)[0]: logprob for token, logprob in _top_tokens(sampled, num_top + 1)}
            for sampled in delta.tokens
        ]
        offset = self._offsets.get(delta.index)
        if offset is None:
            earlier = self.parsed.resumed.get(delta.index, ())
            offset = sum(len(self.names.name(token)[0]) for token in earlier)
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[delta.index] = offset
        values = [_finite(sampled.logprob) for sampled in delta.tokens]
        return CompletionLogprobs(names, values, tops, offsets)


class ChatFormat(ResponseFormat):
    """/v1/chat/completions; the role comes with the first delta of each choice."""

    def event(self, delta: ChoiceDelta) -> ChatChunk:
        content = Delta(delta.text, "assistant" if delta.is_first else UNSET)
        ids = delta.ids if self.parsed.has_ids else UNSET
        choice = DeltaChoice(delta.index, content, self._logprobs(delta), delta.finish, ids)
        usage = None if self.parsed.has_usage else UNSET
        return ChatChunk(self.parsed.id, self.parsed.created, self.model, [choice], usage=usage)

    def usage_event(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self.parsed.id, self.parsed.created, self.model, [], usage=usage)

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> ChatCompletion:
        rendered = [
            ChatChoice(
                delta.index,
                AssistantMessage(delta.text),
                delta.finish,
                self._logprobs(delta),
                delta.ids if self.parsed.has_ids else UNSET,
            )
            for delta in choices
        ]
        return ChatCompletion(self.parsed.id, self.parsed.created, self.model, rendered, usage)

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        num_top = self.num_top
        if num_top is None:
            return None
        content = []
        for sampled in delta.tokens:
            name, raw = self.names.name(sampled.token)
            tops = [
                TokenLogprob(self.names.name(token)[0], logprob, self.names.name(token)[1])
                for token, logprob in _top_tokens(sampled, num_top)
            ]
            content.append(ChatLogprob(name, _finite(sampled.logprob), raw, tops))
        return ChatLogprobs(content)


class GenerateFormat(ResponseFormat):
    """/generate: each stream event holds the whole text so far; several choices are a list."""

    def __init__(self, parsed: ParsedRequest, model: str, names: TokenNames) -> None:
        super().__init__(parsed, model, names)
        self._so_far: dict[int, ChoiceDelta] = {}
        self._is_single = len(parsed.prompts) * parsed.n == 1

    def event(self, delta: ChoiceDelta) -> Generated:
        known = self._so_far.get(delta.index)
        if known is not None:
            delta = replace(delta, text=known.text + delta.text, tokens=[*known.tokens, *delta.tokens])
        self._so_far[delta.index] = delta
        return self._generated(delta, 0)

    def usage_event(self, usage: Usage) -> None:
        """Each event has the counts itself."""

    def whole(self, choices: Iterable[ChoiceDelta], usage: Usage) -> object:
        num_cached = usage.prompt_tokens_details.cached_tokens
        results = [self._generated(delta, num_cached) for delta in choices]
        return results[0] if self._is_single else results

    def _generated(self, delta: ChoiceDelta, num_cached: int) -> Generated:
        parsed, num_top = self.parsed, self.num_top
        ids = [*parsed.resumed.get(delta.index, ()), *delta.ids]
        finish: dict[str, Any] | None = {"type": delta.finish} if delta.finish else None
        if delta.finish == "length" and finish is not None:
            finish["length"] = len(ids)
        rid = getattr(parsed.body, "rid", None)
        meta = GenerateMeta(
            rid if isinstance(rid, str) and rid else parsed.id,
            finish,
            len(parsed.prompts[delta.index // parsed.n]),
            len(ids),
            num_cached,
        )
        if num_top is not None:
            logprobs = [self._logprob(sampled.logprob, sampled.token) for sampled in delta.tokens]
            meta = msgspec.structs.replace(meta, output_token_logprobs=logprobs)
        if num_top:
            tops = [
                [self._logprob(logprob, token) for token, logprob in _top_tokens(sampled, num_top)]
                for sampled in delta.tokens
            ]
            meta = msgspec.structs.replace(meta, output_top_logprobs=tops)
        return Generated(delta.text, ids, meta, UNSET if self._is_single else delta.index)

    def _logprob(self, logprob: float, token: int) -> tuple[float, int, str]:
        return _finite(logprob), token, self.names.name(token)[0]
