"""The ring: slots of shared host memory, the tables of what is in them, and the packets about them."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError, RemoteProtocolError
from baton.plan.steps import Spans
from baton.transport.base import Bytes
from baton.transport.parts.spans import coalesce, cut, split
from baton.transport.shm.segments import Mapping, map_segment

TABLE_SPANS = 8192
"""Spans that fit into a slot, however short they are."""
LONG_BYTES = 32 << 10
"""A span of so many bytes is worth a copy of its own."""
_TABLE_BYTES = TABLE_SPANS * 16
_PAGE_BYTES = 4096
_FORM = struct.Struct("<BB6x6Q")
_NUM_SLOTS_MAX = 256


@dataclass(frozen=True, slots=True)
class RingShape:
    """How many slots a ring has and how large they are."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        """A source believes what a target says here, within reason."""
        if not 2 <= self.num_slots <= _NUM_SLOTS_MAX:
            raise ConfigError(f"a ring has 2 to {_NUM_SLOTS_MAX} slots; got {self.num_slots}")
        if self.slot_bytes < _PAGE_BYTES or self.slot_bytes % _PAGE_BYTES:
            raise ConfigError(f"a slot is a multiple of {_PAGE_BYTES} bytes; got {self.slot_bytes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole ring, its tables included."""
        return self.num_slots * (self.slot_bytes + _TABLE_BYTES)

    def parts(self, spans: Spans) -> list[Spans]:
        """A batch in slot-fulls; one without spans is one empty slot, so that it is announced too."""
        if not len(spans):
            return [spans]
        joined = coalesce(spans)
        # Spans of one length are gathered by one index: too good to lose for a few that happen to adjoin.
        has_one_length = bool((spans.length == spans.length[0]).all())
        if has_one_length and 4 * len(joined) > len(spans) and not are_long(joined):
            joined = spans
        return list(split(cut(joined, self.slot_bytes), self.slot_bytes, TABLE_SPANS))


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as this process has it mapped."""

    index: int
    bytes: Bytes
    table: NDArray[np.int64]


class Ring:
    """A ring as this process has it mapped; unmapped when the last array of it is dropped."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.shape = shape
        mapping: Mapping = map_segment(fd, shape.num_bytes, lambda: False)
        self.bytes = mapping.bytes
        tables = self.bytes[: shape.num_slots * _TABLE_BYTES].view(np.int64).reshape(-1, 2, TABLE_SPANS)
        slots = self.bytes[shape.num_slots * _TABLE_BYTES :].reshape(-1, shape.slot_bytes)
        self.slots = [Slot(index, slots[index], tables[index]) for index in range(shape.num_slots)]


def are_long(spans: Spans) -> bool:
    """Whether spans are long enough, taken together, to be copied one by one."""
    return spans.num_bytes >= LONG_BYTES * max(1, len(spans))


def slot_offsets(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where spans of these lengths begin in a slot that holds them one after the other."""
    return np.cumsum(length) - length


class Word(IntEnum):
    """What a packet says."""

    FILLED = 1  # source: a slot holds spans of a batch
    FREED = 2  # target: the spans of a slot are in their region; the slot may be filled again
    DROPPED = 3  # source: no more slots of this batch will come


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet about a batch; of the rest, a FREED names its slot and a DROPPED its region."""

    word: Word
    batch: int
    region: int = 0
    slot: int = 0
    num_spans: int = 0
    batch_bytes: int = 0
    tag: int = 0
    is_silent: bool = False
    """Whether the target need not announce the batch."""


def send_packet(sock: socket.socket, packet: Packet) -> None:
    """Sends without waiting: there are fewer packets under way than the socket holds."""
    numbers = (packet.batch, packet.region, packet.slot, packet.num_spans, packet.batch_bytes, packet.tag)
    sock.send(_FORM.pack(packet.word, packet.is_silent, *numbers), socket.MSG_DONTWAIT)


def receive_packet(sock: socket.socket) -> Packet | None:
    """Waits for the next packet; None once the other side has hung up."""
    raw = sock.recv(_FORM.size + 1)
    if not raw:
        return None
    try:
        word, is_silent, *numbers = _FORM.unpack(raw)
        batch, region, slot, num_spans, batch_bytes, tag = numbers
        return Packet(Word(word), batch, region, slot, num_spans, batch_bytes, tag, bool(is_silent))
    except (struct.error, ValueError) as cause:
        raise RemoteProtocolError(f"not a packet of a ring: {raw!r} ({cause})") from None
