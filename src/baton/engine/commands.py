"""Messages between the scheduler of an instance and its workers, in msgpack.

The scheduler runs in one process, the workers in others. Every worker of an instance receives every command
in the same order and takes from it what concerns its rank. A step holds one batch per dp group, since the
groups run their MLPs together. All times are seconds of the machine's monotonic clock."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baton.engine.sampling_params import SamplingParams
from baton.protocol.outcomes import Aux, Outcome

PageTables: TypeAlias = dict[str, list[int]]
"""Page ids by page-table group, from slot 0 on; the same ids on every rank of a dp group."""


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step: tokens [start, start + len(tokens)) are computed."""

    sequence: int
    start: int
    tokens: list[int]
    pages: PageTables
    prompt_tokens: int
    """Length of the prompt that was handed over or prefilled; a split cp layout deals rows by it."""
    num_samples: int = 0
    """Tokens to sample from the last position: 0 inside a prompt, more than 1 where an answer forks."""
    embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) in place of the token ids."""
    num_drafted: int = 0
    """How many of the last tokens are draft tokens, to be accepted or rejected by what is sampled."""
    next_token: int | None = None
    """The token after these where it is known, inside a prompt."""
    num_accepted: int = 0
    """Draft tokens of its last step that were accepted: recurrent states have not taken them in."""
    num_guesses: int = 1
    """Draft tokens to predict behind what is sampled, where drafts run."""
    hidden: bytes | None = None
    """The model's normed row (float32) before these, where the draft saw another answer's token."""
    prompt_logprobs: int | None = None
    """As in SamplingParams, while the prompt is prefilled; its first token has none."""

    @property
    def scored_tokens(self) -> list[int]:
        """The prompt's tokens that follow these one by one, where their log-probabilities are asked for."""
        if self.prompt_logprobs is None:
            return []
        return self.tokens[1:] if self.next_token is None else [*self.tokens[1:], self.next_token]


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Before the step: copy one page to another, on every layer and rank."""

    group: str
    source: int
    target: int


class ScheduledBatch(msgspec.Struct, frozen=True, array_like=True):
    """The sequences that one dp group computes in a step."""

    sequences: list[ScheduledSequence] = []
    copies: list[PageCopy] = []

    @property
    def num_rows(self) -> int:
        """Tokens computed."""
        return sum(len(scheduled.tokens) for scheduled in self.sequences)


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run the model once; batches by dp group."""

    number: int
    batches: list[ScheduledBatch]


class StartSequence(msgspec.Struct, frozen=True, tag=True):
    """A sequence is new to the ranks of its dp group: what the sampler needs to know of it."""

    sequence: int
    dp: int
    tokens: list[int]
    """All tokens known so far: the prompt, and what was generated already."""
    num_prompt: int
    params: SamplingParams
    index: int = 0
    """Which of the request's n answers it is."""


class EndSequence(msgspec.Struct, frozen=True, tag=True):
    """Forget a sequence."""

    sequence: int


class SendKV(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a dp group hand this sequence's prompt over as it is computed."""

    sequence: int
    dp: int
    transfer: str
    digest: bytes
    num_tokens: int
    num_cached: int
    """Tokens of the prompt that are in the pool already, ready at once."""
    pages: PageTables
    is_pipelined: bool = True
    policy: str | None = None
    """How its layers are grouped; None: by the policy of the instance."""
    is_queued: bool = False
    """It has no pages yet; when it starts, `SendCached` has its cached tokens, if any."""


class SendCached(msgspec.Struct, frozen=True, tag=True):
    """A prompt that was queued starts with this many tokens in the pool already, ready at once."""

    sequence: int
    num_cached: int
    pages: PageTables


class ReceiveKV(msgspec.Struct, frozen=True, tag=True):
    """The ranks of a dp group receive a prompt into these pages."""

    sequence: int
    dp: int
    transfer: str
    source: str
    digest: bytes
    num_tokens: int
    held: dict[str, int]
    pages: PageTables
    source_dp: int | None = None


class AbortTransfer(msgspec.Struct, frozen=True, tag=True):
    """Give up the hand-over of a sequence."""

    sequence: int
    text: str = ""


class DeclineTransfer(msgspec.Struct, frozen=True, tag=True):
    """This instance has no room for a transfer; the first rank of the dp group informs the source."""

    dp: int
    transfer: str
    source: str
    text: str


class QueueTransfer(msgspec.Struct, frozen=True, tag=True):
    """A transfer waits in the engine's queue, which moves; the dp group's first rank notifies the peer."""

    dp: int
    transfer: str
    source: str = ""
    """Of one that waits for room here; empty: of one that is to be prefilled here."""


class AttachCoordinator(msgspec.Struct, frozen=True, tag=True):
    """The address of the instance's coordinator, for the ranks that do not host it."""

    coordinator: str
    epoch: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the worker."""


Command: TypeAlias = (
    Step
    | StartSequence
    | EndSequence
    | SendKV
    | SendCached
    | ReceiveKV
    | AbortTransfer
    | DeclineTransfer
    | QueueTransfer
    | AttachCoordinator
    | Stop
)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token with the log-probabilities that were asked for, its own among them."""

    token: int
    logprob: float = 0.0
    top: dict[int, float] = {}


class LayerGroupTiming(msgspec.Struct, frozen=True, array_like=True):
    """When a rank computed a group of layers."""

    layers: tuple[int, int]
    start_s: float
    stop_s: float


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step; the rank that samples for its dp group adds tokens by sequence."""

    number: int
    rank: int
    groups: list[LayerGroupTiming]
    samples: dict[int, list[SampledToken]] = {}
    """As many as were asked for; after draft tokens, one more than were accepted."""
    proposals: dict[int, list[int]] = {}
    """By sequence: the draft tokens to follow its last sampled token."""
    hidden: dict[int, bytes] = {}
    """By sequence whose answers fork: the normed row that their first tokens were sampled from."""
    failures: dict[int, str] = {}
    """By sequence that cannot continue, whatever was sampled for it: why."""
    prompt_logprobs: dict[int, list[SampledToken]] = {}
    """By sequence: the `scored_tokens` of the step."""
    unpipelined: str = ""
    """Why the step's hand-overs were not split into groups of layers, where they were not."""
    start_s: float = 0.0
    stop_s: float = 0.0


class TransferUpdate(msgspec.Struct, frozen=True, tag=True):
    """The state of a sequence's hand-over on one rank has changed."""

    rank: int
    sequence: int
    is_granted: bool = False
    is_target_full: bool = False
    """The target has no room for it yet."""
    outcome: Outcome | None = None
    early: Aux | None = None
    is_released: bool = False


class LayerReady(msgspec.Struct, frozen=True, array_like=True):
    """The bytes that one layer had to send for the tokens of one step, or for the cached ones."""

    ready_s: float
    """When the layer was computed; 0 for cached tokens."""
    num_bytes: int
    state_bytes: int = 0
    """How much of it is recurrent state."""


class CopyRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished copy."""

    target_rank: int
    chunk: int
    num_bytes: int
    submitted_s: float
    """Or, where that was later, when its layers were computed."""
    ended_s: float
    layers_ready: list[LayerReady] = []
    """On the first copy of a chunk: the layers that the chunk consists of, in the order of compute."""


class CopiesDone(msgspec.Struct, frozen=True, tag=True):
    """All copies of one hand-over on one rank, once its pages are released."""

    rank: int
    sequence: int
    copies: list[CopyRecord]


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker has loaded its weights. Rank 0 adds its coordinator, and repeats it when all are attached."""

    rank: int
    coordinator: str = ""
    epoch: int = 0
    note: str = ""
    """What users should know about this rank, if anything."""


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on."""

    rank: int
    text: str


Reply: TypeAlias = StepDone | TransferUpdate | CopiesDone | WorkerReady | WorkerFailed
