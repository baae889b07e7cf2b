"""What the two ends of a stream say to each other.

source -> target    part: a header, a table of (start, length) in the target's region, and the bytes
target -> source    landed: a ticket of which one more part is in memory
                    goodbye: the target has stopped writing for this peer, on all its streams, and why
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from baton.errors import RemoteProtocolError

PART_BYTES_MAX = 64 << 20
PART_SPANS_MAX = 16384
_PART = struct.Struct("<8sQQQIIQ")
_WORD = struct.Struct("<B7xQ")
_MAGIC = b"PART\0\0\0\1"
PART_HEADER_BYTES = _PART.size
TABLE_ROW_BYTES = 16
TEXT_BYTES_MAX = 2048


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What is known of a part before its bytes come."""

    region: int
    ticket: int
    tag: int
    num_parts: int
    num_spans: int
    num_bytes: int

    def to_bytes(self) -> bytes:
        """The header as it is sent."""
        return _PART.pack(
            _MAGIC, self.region, self.ticket, self.tag, self.num_parts, self.num_spans, self.num_bytes
        )

    @staticmethod
    def from_bytes(raw: bytes) -> PartHeader:
        """The opposite of `to_bytes`; raises on what no source of ours would send."""
        magic, *numbers = _PART.unpack(raw)
        header = PartHeader(*numbers)
        if magic != _MAGIC or header.num_spans > PART_SPANS_MAX or header.num_bytes > PART_BYTES_MAX:
            raise RemoteProtocolError(f"not a part: {raw!r}")
        return header


class Word(IntEnum):
    """What a target says, and what its number means."""

    LANDED = 1  # a ticket
    GOODBYE = 2  # the length of the text that follows


def landed(ticket: int) -> bytes:
    """One more part of this ticket is in memory."""
    return _WORD.pack(Word.LANDED, ticket)


def goodbye(cause: str) -> bytes:
    """Nothing more of this peer will be written."""
    text = cause.encode()[:TEXT_BYTES_MAX]
    return _WORD.pack(Word.GOODBYE, len(text)) + text


def read_words(heard: bytearray) -> Iterator[int | str]:
    """Takes whole words off the front: the tickets that landed, or the text of a goodbye."""
    while len(heard) >= _WORD.size:
        kind, number = _WORD.unpack_from(heard)
        if kind == Word.LANDED:
            del heard[: _WORD.size]
            yield number
        elif kind == Word.GOODBYE and number <= TEXT_BYTES_MAX:
            if len(heard) < _WORD.size + number:
                return
            text = heard[_WORD.size : _WORD.size + number].decode(errors="replace")
            del heard[: _WORD.size + number]
            yield text
        else:
            raise RemoteProtocolError(f"not a word of a target: {bytes(heard[:16])!r}")
