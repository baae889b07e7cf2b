"""One answer of a request, as the scheduler tracks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.engine.commands import PageTables
from baton.engine.prefix_cache import PrefixNode
from baton.engine.sampling_params import SamplingParams


class SequenceRole(Enum):
    """Where a sequence is prefilled and where decoded."""

    LOCAL = "local"
    """Both here."""
    SOURCE = "source"
    """Prefilled here, decoded elsewhere."""
    TARGET = "target"
    """Prefilled elsewhere, decoded here."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    """It has no pages: it has not started, or it was preempted."""
    PREFILLING = "prefilling"
    """Its known tokens are being computed."""
    RUNNING = "running"
    """All known tokens but the last are computed; it decodes one token a step."""
    RECEIVING = "receiving"
    """It has pages and waits for its KV cache."""
    SENT = "sent"
    """Its prompt is computed; its pages are held until the hand-over releases them."""
    ENDED = "ended"
    """Nothing more is computed; its pages are held while a batch or a hand-over uses them."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request for one answer and its progress; only the scheduler and its KV cache manager write to it."""

    number: int
    """Unique in the instance."""
    prompt: tuple[int, ...]
    params: SamplingParams
    role: SequenceRole = SequenceRole.LOCAL
    arrival_s: float = 0.0
    dp: int = 0
    index: int = 0
    """Which of the request's n answers it is."""
    salt: str = ""
    """Sequences with different salts never share a prefix."""
    prompt_embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) instead of the prompt's ids."""

    generated: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    """Tokens whose cache entries exist."""
    num_scheduled: int = 0
    """Tokens that are computed or in a batch in flight."""
    num_cached: int = 0
    """Tokens found in the prefix cache when it last started."""
    num_in_flight: int = 0
    """Batches in flight that it is part of."""
    is_started: bool = False
    """The caller was told that it started."""
    is_leased: bool = False
    """A hand-over may read or write its pages."""
    is_granted: bool = False
    """The target of its hand-over has pages for it."""
    is_target_full: bool = False
    """The target of its hand-over has said that it has no room yet."""

    pages: PageTables = field(default_factory=dict)
    """Page tables by group."""
    num_freed: dict[str, int] = field(default_factory=dict)
    """By group: leading entries before a window. They stay in the table, but their pages are freed."""
    prefix_node: PrefixNode | None = None
    """The last cached unit of its prefix, which it pins."""

    draft_tokens: tuple[int, ...] = ()
    """The draft's guesses of the next tokens."""
    num_accepted: int = 0
    """Guesses that its last step accepted."""
    draft_hidden: bytes | None = None
    """The row that a fork's first token was sampled from, until the draft layer has processed that token."""

    @property
    def age(self) -> tuple[float, int]:
        """Sorts the oldest first."""
        return (self.arrival_s, self.number)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_tokens_max(self) -> int:
        """The most tokens that are ever computed here; the last sampled one is not."""
        if self.role is SequenceRole.SOURCE:
            return self.num_prompt
        return self.num_prompt + max(1, self.params.max_tokens) - 1

    @property
    def num_samples_last(self) -> int:
        """Tokens to sample once all known ones are computed: n of them where the answers fork."""
        is_first = not self.generated and self.index == 0 and self.role is not SequenceRole.TARGET
        return self.params.n if is_first else 1

    @property
    def prompt_logprobs(self) -> int | None:
        """As in SamplingParams, while they are computed; a prefix that is reused has none."""
        return None if self.generated else self.params.prompt_logprobs

    @property
    def can_preempt(self) -> bool:
        is_computed = self.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING)
        return is_computed and not self.num_in_flight and not self.is_leased

    def held_pages(self, group: str) -> list[int]:
        """The pages of a group that this sequence holds."""
        return self.pages.get(group, [])[self.num_freed.get(group, 0) :]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens [start, stop)."""
        num_prompt = self.num_prompt
        tokens = list(self.prompt[start:stop])
        if stop > num_prompt:
            tokens += self.generated[max(0, start - num_prompt) : stop - num_prompt]
        return tokens

    def embeddings(self, start: int, stop: int) -> bytes | None:
        """Input embeddings of tokens [start, stop), if the prompt has them."""
        raw = self.prompt_embeddings
        if raw is None or start >= self.num_prompt:
            return None
        row = len(raw) // self.num_prompt
        return raw[start * row : stop * row]
