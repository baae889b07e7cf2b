"""Requests whose prompt comes from a source, until they have pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.engine.books.reports import Reservation
from baton.engine.books.scheduler import Scheduler
from baton.engine.commands import Command, DeclineTransfer, ReceiveKV
from baton.engine.instance.record import Record
from baton.engine.requests import Inbound
from baton.errors import ConfigError

RESERVE_S_MAX = 30.0
"""How long a target looks for room before it refuses."""


class Lobby:
    """By dp group, oldest first: who waits for pages."""

    def __init__(
        self,
        books: Sequence[Scheduler],
        tell: Callable[[Command], None],
        refuse: Callable[[Record, str], None],
    ) -> None:
        self._books = books
        self._tell = tell
        self._refuse = refuse
        self._waiting: list[deque[Record]] = [deque() for _ in books]

    def enter(self, record: Record) -> None:
        """One more."""
        self._waiting[record.dp].append(record)

    def leave(self, record: Record, text: str) -> None:
        """One that is not wanted any more, if it is still here; its source is told."""
        if record in self._waiting[record.dp]:
            self._waiting[record.dp].remove(record)
            self._decline(record, text)

    def num_tokens(self, dp: int) -> int:
        """Prompt tokens that wait."""
        return sum(record.request.num_known for record in self._waiting[dp])

    def sizes(self) -> list[int]:
        """Prompt tokens of each that waits."""
        return [record.request.num_known for waiting in self._waiting for record in waiting]

    def reserve(self, now_s: float) -> None:
        """Gives pages to those at the front, and refuses who waited for too long or can never have any."""
        for waiting in self._waiting:
            while waiting and self._serve(waiting[0], now_s):
                waiting.popleft()

    def _serve(self, record: Record, now_s: float) -> bool:
        """Whether a request need not wait any longer."""
        try:
            reservation = self._books[record.dp].reserve(record.sequence())
        except ConfigError as error:
            self._turn_away(record, str(error))
            return True
        if reservation is not None:
            self._receive(record, reservation, now_s)
            return True
        if now_s - record.story.arrived_s < RESERVE_S_MAX:
            return False
        num_tokens = record.request.num_known
        self._turn_away(record, f"no room for {num_tokens} tokens in {RESERVE_S_MAX:.0f} s")
        return True

    def _receive(self, record: Record, reservation: Reservation, now_s: float) -> None:
        hand = record.request.hand
        assert isinstance(hand, Inbound)
        record.is_handing = True
        record.story.begun_s = now_s
        record.story.num_held = max(reservation.held.values(), default=0)
        self._tell(
            ReceiveKV(
                sequence=record.number,
                dp=record.dp,
                transfer=hand.transfer,
                source=hand.source,
                digest=record.digest,
                num_tokens=record.request.num_known,
                held=reservation.held,
                pages=reservation.pages,
                source_dp=hand.source_dp,
            )
        )

    def _turn_away(self, record: Record, text: str) -> None:
        self._decline(record, text)
        self._refuse(record, text)

    def _decline(self, record: Record, text: str) -> None:
        hand = record.request.hand
        assert isinstance(hand, Inbound)
        self._tell(DeclineTransfer(record.dp, hand.transfer, hand.source, text))
