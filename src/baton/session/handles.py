"""What an engine holds of a transfer: the sending and the receiving end.

Handles may be used from any thread. A scheduler that polls reads `state`, one that awaits uses `settled`, and
`wait` serves scripts. A handle's state changes once, from Waiting to an outcome; `is_released` follows when
the pages are the engine's again, which after a failure may be later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from baton.errors import ConfigError, LocalProtocolError
from baton.protocol.outcomes import WAITING, Aux, Outcome, State, Waiting
from baton.transport import NOW, Fence

if TYPE_CHECKING:
    from baton.plan.tokens import Ints
    from baton.session.claims import Claim

AUX_BYTES_MAX = 32 << 20
Pages = Mapping[str, "Sequence[int] | Ints"]
"""Page ids by group: a rank's page table of the prompt, from its first slot on."""


class Handle:
    """What both ends have."""

    def __init__(self, transfer: str) -> None:
        self.transfer = transfer
        self.state: State = WAITING
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

    def conclude(self, outcome: Outcome) -> bool:
        """For the driver: sets the outcome, once."""
        if not isinstance(self.state, Waiting):
            return False
        self.state = outcome
        self._outcome.set_result(outcome)
        return True

    def release(self) -> None:
        """For the driver: gives the pages back."""
        self._released.set()


class SendingCalls(Protocol):
    """What a sending handle asks of its driver; `read_pages` on any thread, the rest on the driver's."""

    def read_pages(self, pages: Pages) -> Mapping[str, Ints]: ...
    def chunk_ready(self, sending: Sending, offered: Offered) -> None: ...
    def seal(self, sending: Sending, aux: Aux | None) -> None: ...
    def answer_ended(self, sending: Sending, aux: Aux) -> None: ...
    def abort_sending(self, sending: Sending, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Offered:
    """A chunk as the engine offered it, with the page table of that moment."""

    index: int
    layers: tuple[int, int]
    tokens: tuple[int, int]
    pages: Mapping[str, Ints]
    fence: Fence


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy of a transfer that ended: to which rank, which chunk, how much, from when to when."""

    target_rank: int
    index: int
    num_bytes: int
    submitted_s: float
    ended_s: float
    is_done: bool


class Sending(Handle):
    """A source rank's end: offer chunks as they are computed, then commit."""

    def __init__(
        self, transfer: str, num_tokens: int, calls: SendingCalls, post: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(transfer)
        self.num_tokens = num_tokens
        self._calls = calls
        self._post = post
        self._reading: dict[int, Callable[[], Mapping[str, Iterable[int]]]] = {}
        self._num_chunks = 0
        self._is_sealed = False
        self.is_granted = False
        """Whether the target has pages for it; requests without may hold half of a source's pool."""
        self.session = 0
        """Which session granted it, once one has: copies of one session share a target instance."""
        self.copies: list[Copied] = []
        """What has been copied so far, in the order of its end."""

    def ready(
        self, layers: tuple[int, int], tokens: tuple[int, int], pages: Pages, fence: Fence = NOW
    ) -> None:
        """These layers of these tokens may be read once the fence is; `pages` begin with slot 0."""
        self._check_open("ready")
        if not 0 <= layers[0] < layers[1] or not 0 <= tokens[0] < tokens[1] <= self.num_tokens:
            raise LocalProtocolError(
                f"transfer {self.transfer}: chunk of layers {layers} x tokens {tokens} is empty or outside "
                f"of {self.num_tokens} tokens"
            )
        table = self._calls.read_pages(pages)
        offered = Offered(self._num_chunks, layers, tokens, table, fence)
        self._num_chunks += 1
        self._reading[offered.index] = lambda: {group: ids.tolist() for group, ids in table.items()}
        self._post(lambda: self._calls.chunk_ready(self, offered))

    def commit(self, aux: Aux | None = None) -> None:
        """There will be no more chunks; the rank that sampled gives the aux record, the others none."""
        self._check_open("commit")
        if aux is not None:
            check_aux(aux)
        self._is_sealed = True
        self._post(lambda: self._calls.seal(self, aux))

    def finish(self, aux: Aux) -> None:
        """The answer is complete here: what was handed over so far is not needed."""
        self._check_open("finish")
        check_aux(aux)
        self._is_sealed = True
        self._post(lambda: self._calls.answer_ended(self, aux))

    def abort(self, text: str = "") -> None:
        """Gives the transfer up; pages are free once `reading` is empty."""
        self._post(lambda: self._calls.abort_sending(self, text))

    def reading(self) -> dict[str, frozenset[int]]:
        """The pages that a copy reads or will read; any other page of the transfer may be used anew."""
        found: dict[str, set[int]] = {}
        if self.is_released:
            # What was offered since then will not be read.
            return {}
        for read in list(self._reading.values()):
            for group, ids in read().items():
                found.setdefault(group, set()).update(ids)
        return {group: frozenset(ids) for group, ids in found.items()}

    def narrow(self, index: int, read: Callable[[], Mapping[str, Iterable[int]]]) -> None:
        """For the driver: which pages a chunk's copies really read, worked out if somebody asks."""
        if index in self._reading:
            self._reading[index] = read

    def let_go(self, index: int) -> None:
        """For the driver: no copy of a chunk reads any more."""
        self._reading.pop(index, None)

    def _check_open(self, call: str) -> None:
        if self._is_sealed:
            raise LocalProtocolError(f"transfer {self.transfer}: {call} after commit or finish")


def check_aux(aux: Aux) -> None:
    """Raises ConfigError on a record that could not be sent, or not be read again."""
    try:
        raw = msgspec.msgpack.encode(aux)
        msgspec.msgpack.decode(raw, type=Aux)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"aux record: {error}; give plain numbers, strings and bytes") from None
    if len(raw) > AUX_BYTES_MAX:
        raise ConfigError(f"aux record of {len(raw)} bytes; at most {AUX_BYTES_MAX} are sent")


class Receiving(Handle):
    """The target's end: wait for the verdict."""

    def __init__(self, transfer: str, abort: Callable[[Receiving, str], None]) -> None:
        super().__init__(transfer)
        self.is_asked = False
        """For the driver: whether the coordinator has heard of it."""
        self.source = ""
        """For the driver: where it is to come from."""
        self.claim: Claim | None = None
        """For the driver: the pages that it keeps from other requests."""
        self.early: Aux | None = None
        """The aux record as soon as it is there, on the rank that asked: the tokens in it may be shown, but
        the transfer may still fail, and the pages are not there before `state` says ready."""
        self._abort = abort

    def abort(self, text: str = "") -> None:
        """Gives the transfer up; its pages come back when `is_released`."""
        self._abort(self, text)
