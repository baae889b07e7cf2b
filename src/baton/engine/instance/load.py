"""How busy an instance is: what others choose by, and when it refuses.

The instance's thread looks at the books now and then and leaves a snapshot, which any thread may read. Rates
are sums of work and of the time it took that both fade, so that they follow the latest seconds of work, and
rest when there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median

from baton.engine.books.scheduler import ACTIVE, Scheduler
from baton.engine.books.sequence import Sequence, State

HALF_S = 5.0
"""After so much more work, what was measured counts half."""
LOOK_S = 0.02
"""How old a snapshot may get while there is work."""
NUM_HANDOFFS = 32
WAIT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages of all groups and dp groups; free, used, leased and quarantined sum to the total."""

    free: int = 0
    cached: int = 0
    """Of the free ones: kept as prefixes until somebody wants pages."""
    used: int = 0
    leased: int = 0
    """In a hand-over that goes on."""
    quarantined: int = 0
    """Of a request that is over, in a hand-over that may still touch them."""
    total: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A moment of an instance; rates are 0 until they were measured."""

    num_running: int = 0
    """Requests that were begun."""
    num_waiting: int = 0
    num_tokens: int = 0
    """Of all requests, as far as they have come."""
    pages: PageUse = field(default_factory=PageUse)
    prefill_tokens_per_s: float = 0.0
    """In steps that computed prompts."""
    decode_tokens_per_s: float = 0.0
    """Of one answer."""
    handoff_s: float = 0.0
    """Median of the latest hand-overs: from a prompt's first token, which a source has and a target is told,
    to its verdict."""
    wait_s: float = 0.0
    """How long a request that comes now would wait, estimated."""


@dataclass(slots=True)
class Rate:
    """How much was done in a second of work, lately."""

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float:
        """Per second; 0: not known."""
        return self.amount / self.seconds if self.seconds > 0.0 else 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much more, done in so many seconds."""
        if seconds > 0.0:
            kept = 0.5 ** (seconds / HALF_S)
            self.amount = self.amount * kept + amount
            self.seconds = self.seconds * kept + seconds


@dataclass(frozen=True, slots=True)
class Queue:
    """Where requests stood when the books last had the choice."""

    num_taken: int = 0
    """Requests that had come by then."""
    num_waiting: int = 0
    """Of these: left waiting."""
    num_slots: int = 0
    """How many more could have begun, as far as their number goes."""

    def num_ahead(self, num_come: int) -> int:
        """Who waits, of all that have come by now; those that may well begin at once are not counted."""
        num_new = num_come - self.num_taken
        return self.num_waiting + num_new if self.num_waiting else max(0, num_new - self.num_slots)


class Gauge:
    """What the instance's thread measures, and the latest snapshot."""

    def __init__(self, all_books: Many[Scheduler] = ()) -> None:
        self.load = Load(pages=_pages(all_books))
        self.queue = Queue(num_slots=sum(map(num_slots, all_books)))
        self.is_fresh = True
        """Whether the snapshot shows everything that happened."""
        self._prefill = Rate()
        self._decode = Rate()
        self._handoffs_s: deque[float] = deque(maxlen=NUM_HANDOFFS)
        self._stepped_s = 0.0
        self._due_s = 0.0

    def stepped(self, num_prompt_tokens: int, start_s: float, stop_s: float) -> None:
        """A step is through; steps of several pipeline stages overlap, and no time counts twice."""
        busy_s = stop_s - max(start_s, self._stepped_s)
        self._stepped_s = max(self._stepped_s, stop_s)
        if num_prompt_tokens:
            self._prefill.add(num_prompt_tokens, busy_s)

    def decoded(self, gap_s: float, num_tokens: int = 1) -> None:
        """An answer's next tokens came so long after the one before."""
        self._decode.add(num_tokens, gap_s)

    def handed(self, handoff_s: float) -> None:
        """A hand-over was through."""
        self._handoffs_s.append(max(0.0, handoff_s))

    def look(self, all_books: Many[Scheduler], lobby: Many[int], num_requests: int, now_s: float) -> None:
        """Takes a snapshot if it is time for one; `lobby` has the tokens of each request that is not in the
        books yet."""
        self.is_fresh = now_s >= self._due_s
        if not self.is_fresh:
            return
        self._due_s = now_s + LOOK_S
        sequences = [each for books in all_books for each in books.sequences.values()]
        waiting = [each for books in all_books for each in books.waiting if not each.asked.index]
        num_waiting = len(waiting) + len(lobby)
        self.load = Load(
            num_running=max(0, num_requests - num_waiting),
            num_waiting=num_waiting,
            num_tokens=sum(lobby) + sum(each.num_tokens for each in sequences),
            pages=_pages(all_books),
            prefill_tokens_per_s=self._prefill.value,
            decode_tokens_per_s=self._decode.value,
            handoff_s=median(self._handoffs_s) if self._handoffs_s else 0.0,
            wait_s=self._wait_s(sequences, num_waiting) if num_waiting else 0.0,
        )

    def _wait_s(self, sequences: Many[Sequence], num_waiting: int) -> float:
        """Until the prompts ahead are computed, and as many answers have ended."""
        prompts = sum(each.num_tokens for each in sequences if each.state is State.WAITING)
        running = [each for each in sequences if each.state is State.RUNNING]
        wait_s = prompts / self._prefill.value if self._prefill.value else 0.0
        if running and self._decode.value:
            to_go = sum(each.params.max_tokens - len(each.generated) for each in running) / len(running)
            wait_s += (num_waiting + 1) * to_go / self._decode.value / len(running)
        return min(WAIT_S_MAX, wait_s)


def num_slots(books: Scheduler) -> int:
    """How many more sequences may be computed or received at once."""
    num_active = sum(1 for each in books.sequences.values() if each.state in ACTIVE)
    return max(0, books.config.sequences_max - num_active)


def _pages(all_books: Many[Scheduler]) -> PageUse:
    found = [_group(books, group) for books in all_books for group in books.room.pools]
    return PageUse(*map(sum, zip(*found, strict=True)))


def _group(books: Scheduler, group: str) -> tuple[int, ...]:
    """In the order of the fields; sequences share pages, so that they are counted as sets."""
    leased: set[int] = set()
    over: set[int] = set()
    for sequence in books.sequences.values():
        if sequence.is_leased:
            (over if sequence.state is State.ENDED else leased).update(sequence.holding.held(group))
    pool = books.room.pools[group]
    counts = pool.counts()
    num_used = counts.num_used - len(leased | over)
    num_free = counts.num_free + counts.num_cached
    return num_free, counts.num_cached, num_used, len(leased), len(over - leased), pool.num_pages
