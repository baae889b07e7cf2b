"""What an engine says and holds of a transfer: digests, requests, and the sending and receiving handles.

Handles may be used from any thread. A scheduler that polls reads `state`, one that awaits uses `settled`, and
`wait` is for scripts. A handle's state changes once, from Waiting to an outcome; `is_released` follows when
the pages are the engine's again, which after a failure may be later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from baton.errors import ConfigError, LocalProtocolError
from baton.plan import Chunk, Prompt, Spec
from baton.plan.routes import check_held
from baton.plan.tokens import Ints
from baton.protocol.ledger import Rectangle, join_boxes
from baton.protocol.outcomes import WAITING, Aux, Cause, Failed, Outcome, State, Waiting
from baton.protocol.timings import check_progress
from baton.transport import NOW, Fence

AUX_BYTES_MAX = 32 << 20
DIGEST_BYTES = 16
TRANSFER_CHARS_MAX = 128
Pages = Mapping[str, Sequence[int] | Ints]
"""Page ids by group: a rank's page table of the prompt, from its first slot on."""


class CheckedPages(dict[str, Ints]):
    """A page table that was read and checked once, for several offers; do not change it."""

    def ids(self) -> dict[str, list[int]]:
        """The same as lists."""
        return {group: ids.tolist() for group, ids in self.items()}


@dataclass(frozen=True, slots=True)
class Digest:
    """What was prefilled: its length and 128 bits that stand for everything that shaped the cache."""

    num_tokens: int
    value: bytes

    def __post_init__(self) -> None:
        Prompt(self.num_tokens)
        if not isinstance(self.value, bytes) or len(self.value) != DIGEST_BYTES:
            raise ConfigError(f"a digest has {DIGEST_BYTES} bytes, got {self.value!r}; use prompt_digest")


def prompt_digest(
    token_ids: Iterable[int], *, adapter: str = "", salt: str = "", embeddings: bytes = b""
) -> Digest:
    """The digest of a prompt: token ids, adapter, cache salt and input embeddings."""
    tokens = np.fromiter(token_ids, dtype="<i8")
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton prompt")
    for part in (tokens.tobytes(), adapter.encode(), salt.encode(), embeddings):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return Digest(len(tokens), hasher.digest())


@dataclass(frozen=True, slots=True)
class Request:
    """A transfer as its target asks for it."""

    transfer: str
    source: str
    """An instance's name, to be looked up, or its coordinator's host:port."""
    digest: Digest
    pages: Mapping[int, Pages]
    """By target rank."""
    held: Mapping[str, int] = field(default_factory=dict)
    source_dp: int | None = None
    """Which group of the source prefills; None: the source says."""
    fence: Fence = NOW
    """The device work of the pages' last owner."""
    is_verified: bool = False
    progress_s: float | None = None
    """How long this transfer may go without progress; the longer of what the two sides name holds for both.
    None: what the source names, or else what the timings of each side say."""

    def checked(self, spec: Spec) -> Request:
        """The request with page tables of its own; raises ConfigError on one that could never be granted."""
        check_transfer(self.transfer)
        if self.progress_s is not None:
            check_progress(self.progress_s)
        check_held(spec, Prompt(self.digest.num_tokens, dict(self.held)))
        layout = spec.layout
        if not self.pages:
            raise ConfigError(f"transfer {self.transfer}: give the pages of at least one rank")
        tables: dict[int, Pages] = {}
        for rank, pages in self.pages.items():
            if not 0 <= rank < layout.num_ranks:
                raise ConfigError(f"pages for rank {rank}, but {layout} has {layout.num_ranks} ranks")
            tables[rank] = read_pages(pages, spec)
        if len({layout.coordinates(rank)["dp"] for rank in self.pages}) > 1:
            ranks = ", ".join(map(str, sorted(self.pages)))
            raise ConfigError(f"ranks {ranks} of {layout} are of several dp groups; a prompt lives in one")
        return replace(self, pages=tables)


def check_transfer(transfer: str) -> None:
    """Raises ConfigError on what cannot be a transfer's id."""
    if not isinstance(transfer, str) or not 0 < len(transfer) <= TRANSFER_CHARS_MAX:
        raise ConfigError(
            f"transfer id {transfer!r:.60}: use a string of 1 to {TRANSFER_CHARS_MAX} characters"
        )


def check_aux(aux: Aux) -> None:
    """Raises ConfigError on a record that could not be sent, or not be read again."""
    try:
        raw = msgspec.msgpack.encode(aux)
        msgspec.msgpack.decode(raw, type=Aux)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"aux record: {error}; give plain numbers, strings and bytes") from None
    if len(raw) > AUX_BYTES_MAX:
        raise ConfigError(f"aux record of {len(raw)} bytes; at most {AUX_BYTES_MAX} are sent")


def read_pages(pages: Pages, spec: Spec) -> CheckedPages:
    """A copy of a page table; raises ConfigError on ids that the pools of a spec do not have."""
    table = CheckedPages()
    for group, ids in pages.items():
        if group not in spec.cache.groups:
            known = ", ".join(spec.cache.groups)
            raise ConfigError(f"no component is in group {group!r}; the cache has {known}")
        array, num_pages = np.asarray(ids), spec.storage.pages_of(group)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(f"pages of group {group!r} have to be a list of integers, got {ids!r}")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < num_pages:
            raise ConfigError(
                f"pages {array.min()} to {array.max()} of group {group!r}: its pools have {num_pages} pages"
            )
        table[group] = array.astype(np.int64)
    return table


class Handle:
    """Common to both ends; `on_change` is called, on the driver's thread, whenever something changed."""

    def __init__(self, transfer: str, on_change: Callable[[Handle], None]) -> None:
        self.transfer = transfer
        self.state: State = WAITING
        self.on_change = on_change
        self._outcome: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self._released = threading.Event()

    @property
    def is_released(self) -> bool:
        """Whether the pages are the engine's again."""
        return self._released.is_set()

    def wait(self, timeout_s: float | None = None) -> State:
        """The outcome, or Waiting if it did not come in time."""
        try:
            return self._outcome.result(timeout_s)
        except concurrent.futures.TimeoutError:
            return self.state

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Whether the pages came back in time."""
        return self._released.wait(timeout_s)

    async def settled(self) -> Outcome:
        """The outcome, as soon as it is known."""
        return await asyncio.shield(asyncio.wrap_future(self._outcome))

    def conclude(self, outcome: Outcome) -> None:
        """For the driver: sets the outcome; the first one stands."""
        if isinstance(self.state, Waiting):
            self.state = outcome
            self._outcome.set_result(outcome)
            self.on_change(self)

    def release(self) -> None:
        """For the driver: gives the pages back."""
        if not self.is_released:
            self._released.set()
            self.on_change(self)

    def refuse(self, cause: Cause) -> None:
        """For the driver: ends a handle that never became a transfer."""
        self.conclude(Failed(cause))
        self.release()


class OfferedChunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A chunk as the engine offered it, with the page table of that moment.

    There is one for each layer of each prompt: without `gc=False` the collector runs inside of a step.
    """

    index: int
    layers: tuple[int, int]
    tokens: tuple[int, int]
    pages: Mapping[str, Ints]
    fence: Fence


@dataclass(frozen=True, slots=True)
class CopyTiming:
    """One copy of a transfer that ended: to which rank, which chunk, how much, from when to when."""

    target_rank: int
    index: int
    num_bytes: int
    submitted_s: float
    ended_s: float
    is_done: bool


class SendingDriver(Protocol):
    """The calls of a sending handle to its driver; `read_pages` on any thread, the rest on the driver's."""

    def read_pages(self, pages: Pages) -> CheckedPages: ...
    def chunk_ready(self, sending: Sending, chunk: OfferedChunk) -> None: ...
    def queued(self, sending: Sending) -> None: ...
    def seal(self, sending: Sending, aux: Aux | None) -> None: ...
    def answer_ended(self, sending: Sending, aux: Aux) -> None: ...
    def abort_sending(self, sending: Sending, text: str) -> None: ...
    def withdraw(self, sending: Sending) -> None: ...


class Withdrawal:
    """The progress of a `Sending.withdraw()`: poll `is_quiet`, or wait for it."""

    def __init__(self) -> None:
        self.landed: tuple[Chunk, ...] = ()
        """Once quiet: what this rank need not offer again, of the whole transfer; none if it has failed."""
        self._quiet = threading.Event()

    @property
    def is_quiet(self) -> bool:
        """Whether no copy reads a page that was offered before, and none will: the pages are the engine's."""
        return self._quiet.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it became quiet in time."""
        return self._quiet.wait(timeout_s)

    def end(self, landed: tuple[Chunk, ...]) -> None:
        """For the driver, through the handle."""
        self.landed = landed
        self._quiet.set()


class Sending(Handle):
    """A source rank's end: offer chunks as they are computed, then commit.

    An engine that preempts the request calls `withdraw`, and after the withdrawal is quiet `resume`; then it
    offers again, out of the pages that it has by then.
    """

    def __init__(
        self,
        transfer: str,
        num_tokens: int,
        driver: SendingDriver,
        post: Callable[[Callable[[], None]], None],
        on_change: Callable[[Handle], None] = lambda handle: None,
    ) -> None:
        super().__init__(transfer, on_change)
        self.num_tokens = num_tokens
        self._driver = driver
        self._post = post
        self._reading: dict[int, Callable[[], Mapping[str, Iterable[int]]]] = {}
        self._lock = threading.RLock()
        """So that an offer comes either before a withdrawal or after it."""
        self._num_chunks = 0
        self._is_sealed = False
        self._is_finished = False
        self._is_committed = False
        """Whether a withdrawal found that everything was sent: later offers and commits change nothing."""
        self._withdrawal: Withdrawal | None = None
        """From `withdraw` to `resume`."""
        self._landed: tuple[Rectangle, ...] = ()
        """As of the last withdrawal."""
        self._dropped: tuple[Rectangle, ...] = ()
        """Chunks that were dropped with a place of their own at the target; the latest come first."""
        self.is_granted = False
        """Whether the target has pages for it; requests without may hold a share of a source's pool."""
        self.is_target_full = False
        """Whether the target has no room for it yet."""
        self.session = 0
        """Which session granted it, once one has: copies of one session share a target instance."""
        self.copies: list[CopyTiming] = []
        """What has been copied so far, in the order of its end."""

    def read_pages(self, pages: Pages) -> CheckedPages:
        """Reads a page table for all offers of a step: each of them would read it anew otherwise."""
        return self._driver.read_pages(pages)

    def ready(
        self, layers: tuple[int, int], tokens: tuple[int, int], pages: Pages, fence: Fence = NOW
    ) -> None:
        """These layers of these tokens may be read once the fence is; `pages` begin with slot 0."""
        if not 0 <= layers[0] < layers[1] or not 0 <= tokens[0] < tokens[1] <= self.num_tokens:
            raise LocalProtocolError(
                f"transfer {self.transfer}: chunk of layers {layers} x tokens {tokens} is empty or outside "
                f"of {self.num_tokens} tokens"
            )
        table = pages if isinstance(pages, CheckedPages) else self._driver.read_pages(pages)
        with self._lock:
            self._check_open("ready")
            parts = [(layers, tokens)]
            if self._landed or self._dropped or self._is_committed:
                parts = [(box.layers, box.tokens) for box in self._missing(Rectangle(layers, tokens))]
            for part_layers, part_tokens in parts:
                chunk = OfferedChunk(self._num_chunks, part_layers, part_tokens, table, fence)
                self._num_chunks += 1
                self._reading[chunk.index] = table.ids
                self._post(partial(self._driver.chunk_ready, self, chunk))

    def queued(self) -> None:
        """The engine has not begun to prefill it, and its queue moves: the deadlines begin anew."""
        self._post(partial(self._driver.queued, self))

    def commit(self, aux: Aux | None = None) -> None:
        """There will be no more chunks; the rank that sampled gives the aux record, the others none."""
        if aux is not None:
            check_aux(aux)
        with self._lock:
            self._check_open("commit")
            self._is_sealed = True
            if not self._is_committed:
                self._post(partial(self._driver.seal, self, aux))

    def finish(self, aux: Aux) -> None:
        """The answer is complete here: what was handed over so far is not needed."""
        check_aux(aux)
        with self._lock:
            self._check_unsealed("finish")
            self._is_sealed = self._is_finished = True
            self._post(partial(self._driver.answer_ended, self, aux))

    def abort(self, text: str = "") -> None:
        """Gives the transfer up; pages are free once `reading` is empty."""
        self._post(partial(self._driver.abort_sending, self, text))

    def withdraw(self) -> Withdrawal:
        """The engine preempts the request: drops what was offered and not copied, to be offered again.

        It does not block. The transfer goes on: the target keeps its pages, and the deadlines run. Nothing
        may be offered until the withdrawal is quiet and `resume` was called. Called again before that, it
        returns the same withdrawal.
        """
        with self._lock:
            if self._withdrawal is None:
                self._withdrawal = Withdrawal()
                if self.is_released:
                    self._withdrawal.end(())
                else:
                    self._post(partial(self._driver.withdraw, self))
            return self._withdrawal

    def resume(self) -> None:
        """After a withdrawal, offers are accepted again: of everything, as what has landed is passed over.

        A rank that had committed commits again.
        """
        with self._lock:
            if self._withdrawal is None:
                raise LocalProtocolError(f"transfer {self.transfer}: resume without withdraw")
            if not self._withdrawal.is_quiet:
                raise LocalProtocolError(
                    f"transfer {self.transfer}: resume while copies may still read withdrawn pages; wait "
                    "until the withdrawal is quiet"
                )
            self._withdrawal = None
            self._is_sealed = self._is_finished

    def reading(self) -> dict[str, frozenset[int]]:
        """The pages that a copy reads or will read; any other page of the transfer may be used anew."""
        if self.is_released:
            # What was offered since then will not be read.
            return {}
        pages: dict[str, set[int]] = {}
        for read in list(self._reading.values()):
            for group, ids in read().items():
                pages.setdefault(group, set()).update(ids)
        return {group: frozenset(ids) for group, ids in pages.items()}

    @property
    def withdrawal(self) -> Withdrawal | None:
        """The withdrawal that was not resumed yet."""
        return self._withdrawal

    def withdrawn(self) -> tuple[tuple[Rectangle, ...], tuple[Rectangle, ...], bool]:
        """What `end_withdrawal` was called with last."""
        return self._landed, self._dropped, self._is_committed

    def chunks_read(self) -> tuple[int, tuple[int, ...]]:
        """How many chunks were offered, and those of them that a copy reads or will read."""
        with self._lock:
            return self._num_chunks, tuple(sorted(self._reading))

    def release_chunks(self, num_offered: int, reading: Iterable[int]) -> None:
        """For the driver: of the chunks offered first, only these are read any more."""
        kept = frozenset(reading)
        for index in [index for index in list(self._reading) if index < num_offered and index not in kept]:
            self.release_chunk(index)

    def narrow(self, index: int, read: Callable[[], Mapping[str, Iterable[int]]]) -> None:
        """For the driver: which pages a chunk's copies really read, computed when the engine asks."""
        if index in self._reading:
            self._reading[index] = read

    def release_chunk(self, index: int) -> None:
        """For the driver: no copy of a chunk reads any more."""
        self._reading.pop(index, None)
        self.end_withdrawal_if_settled()

    def conclude(self, outcome: Outcome) -> None:
        super().conclude(outcome)
        self.end_withdrawal_if_settled()

    def release(self) -> None:
        super().release()
        # A withdrawal that its driver did not hear of any more: nothing is read.
        if (withdrawal := self._withdrawal) is not None and not withdrawal.is_quiet:
            withdrawal.end(())
            self.on_change(self)

    def end_withdrawal(
        self, landed: tuple[Rectangle, ...], dropped: tuple[Rectangle, ...], is_committed: bool
    ) -> None:
        """For the driver: withdrawn pages are not read any more, and the transfer can go on."""
        if self._withdrawal is not None and not self._withdrawal.is_quiet:
            self._landed, self._dropped, self._is_committed = join_boxes(landed), dropped, is_committed
            self._withdrawal.end(tuple(Chunk(box.layers, box.tokens) for box in self._landed))
            self.on_change(self)

    def end_withdrawal_if_settled(self) -> None:
        """For the driver: where the transfer has ended, its pages are free with its last copy."""
        withdrawal = self._withdrawal
        if withdrawal is None or withdrawal.is_quiet or isinstance(self.state, Waiting) or self._reading:
            return
        withdrawal.end(())
        self.on_change(self)

    def _missing(self, box: Rectangle) -> list[Rectangle]:
        """The parts of a chunk that have not landed, cut to fit the places of dropped chunks."""
        missing = [] if self._is_committed else [box]
        for landed in self._landed:
            missing = [part for whole in missing for part in whole.without(landed)]
        parts: list[Rectangle] = []
        for dropped in self._dropped:
            parts += [part for whole in missing if (part := whole.common(dropped)) is not None]
            missing = [part for whole in missing for part in whole.without(dropped)]
        return parts + missing

    def _check_open(self, call: str) -> None:
        if self._withdrawal is not None:
            raise LocalProtocolError(
                f"transfer {self.transfer}: {call} after withdraw, so its pages may be another request's by "
                "now; call resume first, and give the page table that the request has since then"
            )
        self._check_unsealed(call)

    def _check_unsealed(self, call: str) -> None:
        if self._is_sealed or (self._is_committed and call == "finish"):
            raise LocalProtocolError(f"transfer {self.transfer}: {call} after commit or finish")


class Receiving(Handle):
    """The target's end: wait for the verdict."""

    def __init__(
        self,
        transfer: str,
        source: str,
        abort: Callable[[Receiving, str], None],
        on_change: Callable[[Handle], None],
    ) -> None:
        super().__init__(transfer, on_change)
        self.source = source
        """For the driver: where it is to come from."""
        self.is_asked = False
        """For the driver: whether the coordinator knows of it."""
        self.claim: int | None = None
        """For the driver: the number of its claim on pages."""
        self.early: Aux | None = None
        """The aux record as soon as it is there, on the rank that asked: the tokens in it may be shown, but
        the transfer may still fail, and the pages are not there before `state` says ready."""
        self._abort = abort

    def abort(self, text: str = "") -> None:
        """Gives the transfer up; its pages come back when `is_released`."""
        self._abort(self, text)
