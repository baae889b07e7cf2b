"""Requests of many sorts for a load, each with what has to come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.serve.speaking import Expected, chat_ids, encode, oracle_text, tokenizer

NUM_TOKENS_MAX = 24
CONTEXT_MAX = 2048
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "then",
    "main",
    "print",
    "42",
]
_WORDS += ["caf\u00e9", "\u4f60\u597d"]


@dataclass(frozen=True, slots=True)
class Leave:
    """A client that goes away: after so many pieces of a stream, or after a time."""

    num_pieces: int = 0
    after_s: float = 0.0


@dataclass(frozen=True)
class Question:
    """One request and what is expected of it."""

    kind: str
    path: str
    body: Any
    choices: tuple[Expected, ...] = ()
    """By index; empty for a request that has to be refused or that samples."""
    num_prompt_tokens: int = 0
    statuses: tuple[int, ...] = (200,)
    seeded: str = ""
    """Requests of the same sort and seed have to get the same answer, whoever answers."""
    num_sampled: int = 0
    """Choices of a request that samples."""
    leave: Leave | None = None
    method: str = "POST"

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes in pieces."""
        return isinstance(self.body, dict) and self.body.get("stream") is True

    @property
    def is_bad(self) -> bool:
        """Whether it has to be refused."""
        return 200 not in self.statuses

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.path == CHAT


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, its tokens, and the greedy answer to it."""

    said: Any
    """Text, token ids or messages, as it stands in a body."""
    ids: tuple[int, ...]
    answer: Expected

    @property
    def is_chat(self) -> bool:
        """Whether it is a list of messages."""
        return isinstance(self.said, list) and isinstance(self.said[0], dict)

    def cut(self, max_tokens: int) -> Expected:
        """The answer when it may have only so many tokens."""
        return oracle_cut(self.answer, max_tokens)


def oracle_cut(answer: Expected, max_tokens: int) -> Expected:
    """The beginning of a greedy answer."""
    if max_tokens >= len(answer.tokens):
        return answer
    tokens = answer.tokens[:max_tokens]
    return replace(answer, tokens=tokens, text=tokenizer().decode(tokens), finish="length")


def text_of(chance: Random, num_words: int) -> str:
    """Words in any order."""
    return " ".join(chance.choice(_WORDS) for _ in range(num_words))


@dataclass
class Catalogue:
    """A fixed set of prompts, and questions about them by chance."""

    seed: int = 0
    model: str = "tiny"
    num_long_tokens: int = 900
    bad_share: float = 0.2
    leave_share: float = 0.12
    short: list[Prompt] = field(default_factory=list)
    long: list[Prompt] = field(default_factory=list)
    chats: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = Random(self.seed)
        # Two that end by themselves, at once and soon; see test_deployment.py.
        self.short += [_prompt([47]), _prompt([81])]
        shared = text_of(chance, 60)
        while len(self.short) < 20:
            text = text_of(chance, chance.randint(1, 12))
            self._add(self.short, text if chance.random() < 0.7 else encode(text))
        while len(self.long) < 10:
            num_words = chance.randint(self.num_long_tokens // 6, self.num_long_tokens // 2)
            begin = shared if chance.random() < 0.5 else ""
            self._add(self.long, f"{begin} {text_of(chance, num_words)}")
        while len(self.chats) < 8:
            turns = [{"role": "user", "content": text_of(chance, chance.randint(1, 20))}]
            if chance.random() < 0.5:
                turns.insert(0, {"role": "system", "content": shared})
            self._add(self.chats, turns)

    def _add(self, prompts: list[Prompt], said: Any) -> None:
        found = _prompt(said)
        if found.answer.is_certain:
            prompts.append(found)

    def any_prompt(self, chance: Random) -> Prompt:
        """Mostly short ones."""
        return chance.choice(chance.choices([self.short, self.long, self.chats], [5, 2, 3])[0])

    def question(self, chance: Random) -> Question:
        """One of any sort."""
        if chance.random() < self.bad_share:
            return bad(chance, self.model)
        sort = chance.choices(["plain", "many", "batch", "seeded", "stop"], [10, 2, 2, 2, 1])[0]
        question: Question = getattr(self, sort)(chance)
        if chance.random() < 0.5:
            body = {**question.body, "stream": True}
            if chance.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
            question = replace(question, body=body)
        if chance.random() < self.leave_share:
            return replace(question, leave=_leave(chance, question.is_stream))
        return question

    def plain(self, chance: Random) -> Question:
        """One prompt, one greedy answer."""
        prompt = self.any_prompt(chance)
        return self._asked("plain", prompt, {"max_tokens": chance.randint(1, NUM_TOKENS_MAX)})

    def many(self, chance: Random) -> Question:
        """Several answers to one prompt."""
        prompt = self.any_prompt(chance)
        return self._asked("many", prompt, {"max_tokens": chance.randint(2, 12), "n": chance.randint(2, 4)})

    def batch(self, chance: Random) -> Question:
        """Several prompts, perhaps with several answers each."""
        prompts = chance.sample(
            [each for each in self.short if isinstance(each.said, str)], chance.randint(2, 4)
        )
        num_answers, max_tokens = chance.choice([1, 1, 2]), chance.randint(1, 12)
        body = self._body(max_tokens=max_tokens, prompt=[each.said for each in prompts], n=num_answers)
        choices = tuple(each.cut(max_tokens) for each in prompts for _ in range(num_answers))
        return Question("batch", COMPLETIONS, body, choices, sum(len(each.ids) for each in prompts))

    def seeded(self, chance: Random) -> Question:
        """Sampled answers, which a seed makes the same wherever they are computed."""
        prompt = chance.choice(self.short[2:6])
        seed, num_answers = chance.randrange(3), chance.choice([1, 2])
        more = {"max_tokens": 10, "temperature": 0.8, "top_p": 0.9, "seed": seed, "n": num_answers}
        question = self._asked("seeded", prompt, more)
        key = f"{prompt.ids} {seed} {num_answers}"
        return replace(question, choices=(), seeded=key, num_sampled=num_answers)

    def stop(self, chance: Random) -> Question:
        """An answer that ends at a string of its text."""
        prompt = chance.choice([each for each in self.short[2:] if len(each.answer.text) > 8])
        stop = _stop_string(prompt.answer.text, chance)
        question = self._asked("stop", prompt, {"max_tokens": NUM_TOKENS_MAX, "stop": stop})
        return replace(question, choices=(oracle_text(prompt.ids, NUM_TOKENS_MAX, stop=stop),))

    def _asked(self, kind: str, prompt: Prompt, more: dict[str, Any]) -> Question:
        name = "messages" if prompt.is_chat else "prompt"
        body = self._body(**{name: prompt.said}, **more)
        choices = (prompt.cut(more["max_tokens"]),) * more.get("n", 1)
        return Question(kind, CHAT if prompt.is_chat else COMPLETIONS, body, choices, len(prompt.ids))

    def _body(self, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0, **more}


def _prompt(said: Any) -> Prompt:
    if isinstance(said, str):
        ids = encode(said)
    else:
        ids = chat_ids(said) if isinstance(said[0], dict) else list(said)
    return Prompt(said, tuple(ids), oracle_text(ids, NUM_TOKENS_MAX))


def _stop_string(text: str, chance: Random) -> str:
    """A piece of a text that has no broken characters, whose place depends on how they are cut."""
    whole = [place for place in range(len(text) - 1) if "\ufffd" not in text[: place + 2]]
    place = chance.choice(whole) if whole else 0
    return text[place : place + 2] if whole else "no such text"


def _leave(chance: Random, is_stream: bool) -> Leave:
    if is_stream and chance.random() < 0.7:
        return Leave(num_pieces=chance.randint(1, 5))
    return Leave(after_s=chance.choice([0.0, 0.01, 0.05, 0.2, 0.5]))


def bad(chance: Random, model: str = "tiny") -> Question:
    """One that has to be refused."""
    kind, path, body, statuses, *method = chance.choice(bad_requests(model))
    return Question(f"bad {kind}", path, body, statuses=statuses, method=method[0] if method else "POST")


def bad_requests(model: str) -> Sequence[tuple[Any, ...]]:
    """Kind, path, body, the statuses that are right, and the method where it is another."""
    text = {"model": model, "prompt": "the fox", "max_tokens": 4}
    talk = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    fields = [
        ("n", 0),
        ("n", 10_000),
        ("n", "two"),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 7),
        ("stop", [""] * 100),
        ("stop", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 1e9}),
        ("presence_penalty", 99),
        ("seed", "s"),
        ("stream", "perhaps"),
        ("logprobs", -3),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
    ]
    wrong = [
        (f"{name}={value!r}"[:40], COMPLETIONS, {**text, name: value}, (400, 422)) for name, value in fields
    ]
    return [
        *wrong,
        ("no prompt", COMPLETIONS, {"model": model}, (400,)),
        ("no prompts", COMPLETIONS, {**text, "prompt": []}, (400,)),
        ("deep prompt", COMPLETIONS, {**text, "prompt": deep}, (400,)),
        ("prompt of floats", COMPLETIONS, {**text, "prompt": [1.5, 2]}, (400,)),
        ("negative id", COMPLETIONS, {**text, "prompt": [-1]}, (400,)),
        ("id beyond the vocabulary", COMPLETIONS, {**text, "prompt": [10**6]}, (400,)),
        ("huge id", COMPLETIONS, {**text, "prompt": [2**70]}, (400,)),
        ("prompt over the limit", COMPLETIONS, {**text, "prompt": [5] * (CONTEXT_MAX + 10)}, (400,)),
        ("no messages", CHAT, {"model": model}, (400,)),
        ("empty messages", CHAT, {**talk, "messages": []}, (400,)),
        ("role", CHAT, {**talk, "messages": [{"role": "nobody", "content": "x"}]}, (400,)),
        ("content", CHAT, {**talk, "messages": [{"role": "user", "content": 7}]}, (400,)),
        (
            "forced tool",
            CHAT,
            {
                **talk,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            (400,),
        ),
        ("a list", COMPLETIONS, [1, 2], (400,)),
        ("no JSON", COMPLETIONS, b'{"prompt": ', (400,)),
        ("no UTF-8", COMPLETIONS, b'{"prompt": "\xff\xfe"}', (400,)),
        ("no path", "/v1/nothing", text, (404,)),
        ("method", COMPLETIONS, None, (405,), "GET"),
        ("two in one", COMPLETIONS, b'{"prompt": "x"}{"prompt": "y"}', (400,)),
    ]
