"""How busy an instance is: the load that routers choose by, and the admission limit.

The instance's thread takes a snapshot of its schedulers every few milliseconds, which any thread may read.
Rates are decaying sums of work and of the time that it took: they follow the latest seconds of work, and stay
as they are while there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, SequenceStatus
from baton.errors import FullError

HALF_LIFE_S = 5.0
"""After this much more work, a measurement has half its weight."""
SNAPSHOT_S = 0.02
"""The age at which a snapshot is replaced while there is work."""
NUM_HANDOFFS = 32
WAIT_S_MAX = 60.0
RETRY_S_MIN = 1.0


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages of all groups and dp groups; free, used, leased and quarantined sum to the total."""

    free: int = 0
    cached: int = 0
    """Of the free ones: cached prefixes, which are evicted when pages are needed."""
    used: int = 0
    leased: int = 0
    """In a hand-over that is under way."""
    quarantined: int = 0
    """Of a request that has ended, in a hand-over that may still touch them."""
    total: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of an instance; rates are 0 until they are measured."""

    num_running: int = 0
    """Requests that were started."""
    num_waiting: int = 0
    num_tokens: int = 0
    """Known tokens of all requests."""
    pages: PageUse = field(default_factory=PageUse)
    prefill_tokens_per_s: float = 0.0
    """In steps that computed prompts."""
    decode_tokens_per_s: float = 0.0
    """Of one answer."""
    handoff_s: float = 0.0
    """Median of the latest hand-overs, from the first token (at a target its arrival) to the outcome."""
    wait_s: float = 0.0
    """How long a new request would wait, estimated."""
    num_steps: int = 0
    """That were computed since the start: while they grow, the queue moves."""


@dataclass(slots=True)
class Rate:
    """Work per second, lately."""

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float:
        """Per second; 0: not known."""
        return self.amount / self.seconds if self.seconds > 0.0 else 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0.0:
            kept = 0.5 ** (seconds / HALF_LIFE_S)
            self.amount = self.amount * kept + amount
            self.seconds = self.seconds * kept + seconds


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The queue when the scheduler last could start requests."""

    num_taken: int = 0
    """Requests that had arrived by then."""
    num_waiting: int = 0
    """Of these: left waiting."""
    num_slots: int = 0
    """How many more could have started, as far as their number goes."""

    def num_ahead(self, num_submitted: int) -> int:
        """Requests in the queue, given how many were submitted; those that may start at once do not count."""
        num_new = num_submitted - self.num_taken
        return self.num_waiting + num_new if self.num_waiting else max(0, num_new - self.num_slots)


class LoadMonitor:
    """Measurements of the instance's thread, and the latest snapshot."""

    def __init__(self, schedulers: Many[Scheduler] = ()) -> None:
        self.load = EngineLoad(pages=_page_use(schedulers))
        self.queue = QueueSnapshot(num_slots=sum(scheduler.num_slots for scheduler in schedulers))
        self.is_fresh = True
        """Whether the snapshot shows everything that happened."""
        self._prefill = Rate()
        self._decode = Rate()
        self._handoffs_s: deque[float] = deque(maxlen=NUM_HANDOFFS)
        self._num_steps = 0
        self._last_step_s = 0.0
        self._due_s = 0.0

    def record_step(self, num_prompt_tokens: int, start_s: float, stop_s: float) -> None:
        """Counts a step; steps of several pipeline stages overlap, and no time counts twice."""
        self._num_steps += 1
        busy_s = stop_s - max(start_s, self._last_step_s)
        self._last_step_s = max(self._last_step_s, stop_s)
        if num_prompt_tokens:
            self._prefill.add(num_prompt_tokens, busy_s)

    def record_decode(self, gap_s: float, num_tokens: int = 1) -> None:
        """Counts tokens of an answer that came this long after the one before."""
        self._decode.add(num_tokens, gap_s)

    def record_handoff(self, handoff_s: float) -> None:
        self._handoffs_s.append(max(0.0, handoff_s))

    def update(
        self, schedulers: Many[Scheduler], waiting_for_kv: Many[int], num_requests: int, now_s: float
    ) -> None:
        """Takes a snapshot if one is due; `waiting_for_kv` has the prompt lengths of unreserved requests."""
        self.is_fresh = now_s >= self._due_s
        if not self.is_fresh:
            return
        self._due_s = now_s + SNAPSHOT_S
        sequences = [s for scheduler in schedulers for s in scheduler.sequences.values()]
        num_waiting = len(waiting_for_kv) + sum(
            1 for scheduler in schedulers for sequence in scheduler.waiting if not sequence.index
        )
        self.load = EngineLoad(
            num_running=max(0, num_requests - num_waiting),
            num_waiting=num_waiting,
            num_tokens=sum(waiting_for_kv) + sum(sequence.num_tokens for sequence in sequences),
            pages=_page_use(schedulers),
            prefill_tokens_per_s=self._prefill.value,
            decode_tokens_per_s=self._decode.value,
            handoff_s=median(self._handoffs_s) if self._handoffs_s else 0.0,
            wait_s=self._wait_s(sequences, num_waiting) if num_waiting else 0.0,
            num_steps=self._num_steps,
        )

    def check_admission(self, name: str, num_submitted: int, queue_max: int) -> None:
        """Raises FullError if `queue_max` requests wait already; 0 is no limit. Any thread may call."""
        num_ahead = self.queue.num_ahead(num_submitted)
        if num_ahead >= queue_max > 0:
            wait_s = max(RETRY_S_MIN, self.load.wait_s)
            raise FullError(
                f"{name} is full: {num_ahead} requests wait, at most {queue_max} may; "
                f"ask again in {wait_s:.0f} s",
                wait_s,
            )

    def _wait_s(self, sequences: Many[Sequence], num_waiting: int) -> float:
        """Until the prompts ahead are computed, and as many answers have ended."""
        num_prompt_tokens = sum(s.num_tokens for s in sequences if s.status is SequenceStatus.WAITING)
        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        wait_s = num_prompt_tokens / self._prefill.value if self._prefill.value else 0.0
        if running and self._decode.value:
            num_left = sum(s.params.max_tokens - len(s.generated) for s in running) / len(running)
            wait_s += (num_waiting + 1) * num_left / self._decode.value / len(running)
        return min(WAIT_S_MAX, wait_s)


def _page_use(schedulers: Many[Scheduler]) -> PageUse:
    groups = [_group_use(scheduler, group) for scheduler in schedulers for group in scheduler.kv_cache.pools]
    return PageUse(*map(sum, zip(*groups, strict=True)))


def _group_use(scheduler: Scheduler, group: str) -> tuple[int, ...]:
    """In the order of PageUse's fields. Sequences share pages, so leased pages are counted as sets."""
    leased: set[int] = set()
    quarantined: set[int] = set()
    for sequence in scheduler.sequences.values():
        if sequence.is_leased:
            is_ended = sequence.status is SequenceStatus.ENDED
            (quarantined if is_ended else leased).update(sequence.held_pages(group))
    pool = scheduler.kv_cache.pools[group]
    counts = pool.counts()
    num_used = counts.num_used - len(leased | quarantined)
    num_free = counts.num_free + counts.num_cached
    return num_free, counts.num_cached, num_used, len(leased), len(quarantined - leased), pool.num_pages
