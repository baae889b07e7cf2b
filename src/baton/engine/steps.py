"""What the scheduler tells the ranks of its instance, and what they answer.

The scheduler lives in one process, the ranks in others; these are the messages between them, in msgpack. All
ranks of an instance hear every order in the same sequence, and each takes from it what concerns it. A step
holds one batch per dp group, since the groups run their MLPs together.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baton.engine.sampling_params import SamplingParams
from baton.protocol.outcomes import Aux, Outcome

Tables: TypeAlias = dict[str, list[int]]
"""Page ids by page-table group, from slot 0 on; the same ids on every rank of a dp group."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step: tokens [start, start + len(tokens)) are computed."""

    sequence: int
    start: int
    tokens: list[int]
    pages: Tables
    prompt_tokens: int
    """Length of the prompt that was handed over or prefilled: what a split cp layout deals by."""
    num_samples: int = 0
    """Tokens to sample from the last position: 0 inside a prompt, more than 1 where an answer forks."""
    embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) in place of the token ids."""
    num_drafted: int = 0
    """How many of the last tokens are guesses: what is sampled before each decides whether it stands."""
    next_token: int | None = None
    """The token after these where it is known, inside a prompt; only drafts need it."""
    hidden: bytes | None = None
    """The model's normed row (float32) before these, where the draft saw another answer's token."""


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Before the step: the content of one page is copied to another, on every layer and rank."""

    group: str
    source: int
    target: int


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What one dp group computes in a step."""

    works: list[Work] = []
    copies: list[PageCopy] = []

    @property
    def num_rows(self) -> int:
        """Tokens computed."""
        return sum(len(work.tokens) for work in self.works)


class Step(msgspec.Struct, frozen=True, tag=True):
    """One pass through the model; batches by dp group."""

    number: int
    batches: list[Batch]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A sequence is new to the ranks of its dp group: what the sampler has to know of it."""

    sequence: int
    dp: int
    tokens: list[int]
    """All tokens known so far: the prompt, and what was generated already."""
    num_prompt: int
    params: SamplingParams
    index: int = 0
    """Which of the request's n answers it is."""


class Send(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a dp group hand this sequence's prompt over as it is computed."""

    sequence: int
    dp: int
    transfer: str
    digest: bytes
    num_tokens: int
    num_cached: int
    """Tokens of the prompt that are in the pool already, ready at once."""
    pages: Tables
    is_pipelined: bool = True
    policy: str | None = None
    """Where its layers are cut; None: as the instance does."""


class Receive(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a dp group wait for a prompt in these pages."""

    sequence: int
    dp: int
    transfer: str
    source: str
    digest: bytes
    num_tokens: int
    held: dict[str, int]
    pages: Tables
    source_dp: int | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """A sequence's hand-over is given up."""

    sequence: int
    text: str = ""


class End(msgspec.Struct, frozen=True, tag=True):
    """The ranks may forget a sequence."""

    sequence: int


class Decline(msgspec.Struct, frozen=True, tag=True):
    """This instance has no room for a transfer; the first rank of the group tells its source."""

    dp: int
    transfer: str
    source: str
    text: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Where the coordinator of the instance is, for the ranks that do not host it."""

    coordinator: str
    epoch: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The rank ends."""


Order: TypeAlias = Step | Begin | Send | Receive | Abort | Decline | End | Attach | Stop


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token with the log-probabilities that were asked for, its own among them."""

    token: int
    logprob: float = 0.0
    top: dict[int, float] = {}


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of layers that a rank computed in one go, in seconds of the machine's monotonic clock."""

    layers: tuple[int, int]
    start_s: float
    stop_s: float


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank is through a step; the one that samples in each dp group has tokens by sequence."""

    number: int
    rank: int
    groups: list[Group]
    samples: dict[int, list[Sampled]] = {}
    """As many as were asked for or, behind guesses, as stand: one more than guesses that did."""
    proposals: dict[int, int] = {}
    """By sequence: what the draft guesses to follow its last sampled token."""
    hidden: dict[int, bytes] = {}
    """By sequence whose answers fork: the normed row that their first tokens were sampled from."""
    unpipelined: str = ""
    """Why the step's hand-overs were not cut into groups, where they were not."""
    start_s: float = 0.0
    stop_s: float = 0.0


class Changed(msgspec.Struct, frozen=True, tag=True):
    """A rank's hand-over of a sequence has come further."""

    rank: int
    sequence: int
    is_granted: bool = False
    outcome: Outcome | None = None
    early: Aux | None = None
    is_released: bool = False


class Due(msgspec.Struct, frozen=True, array_like=True):
    """What one layer had to send of the tokens of one step, or of those that were cached."""

    ready_s: float
    """When the layer was computed, in seconds of the machine's monotonic clock; 0: before the prompt was."""
    num_bytes: int
    state_bytes: int = 0
    """How much of it is recurrent state."""


class CopyRecord(msgspec.Struct, frozen=True, array_like=True):
    """One copy that was done, in seconds of the machine's monotonic clock."""

    target_rank: int
    chunk: int
    num_bytes: int
    submitted_s: float
    """Or, where that was later, when its layers were computed."""
    ended_s: float
    dues: list[Due] = []
    """On the first copy of a chunk: what the chunk consisted of, in the order in which that was computed."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """All copies of one hand-over on one rank, once its pages are released."""

    rank: int
    sequence: int
    copies: list[CopyRecord]


class Up(msgspec.Struct, frozen=True, tag=True):
    """A rank is loaded and attaches; the first one says where its coordinator is, and again once all are."""

    rank: int
    coordinator: str = ""
    epoch: int = 0
    registry: str = ""


class Down(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on."""

    rank: int
    text: str


Answer: TypeAlias = StepDone | Changed | Copied | Up | Down
