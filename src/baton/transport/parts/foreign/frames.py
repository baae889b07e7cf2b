"""What crosses the socket of a connection.

source -> target    ask: a region's number, and the identity of the kernel that the source runs on
                    landed: the tag of a batch and its number of bytes
target -> source    given: a region's number and size, and what the library needs to write it
                    refused: a region's number and why
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from baton.errors import RemoteProtocolError

_FORM = struct.Struct("<B3xIQQ")
HEADER_BYTES = _FORM.size
PAYLOAD_BYTES_MAX = 1 << 20


class Kind(IntEnum):
    """Who says it, and what the two numbers of the frame mean."""

    ASK = 1  # source: region
    GIVEN = 2  # target: region, its size
    REFUSED = 3  # target: region
    LANDED = 4  # source: tag, number of bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before the payload."""

    kind: Kind
    payload_bytes: int
    first: int
    second: int

    @staticmethod
    def from_bytes(raw: bytes | bytearray) -> Header:
        """Reads a header; raises on what no end of ours would send."""
        kind, payload_bytes, first, second = _FORM.unpack(raw)
        if kind not in Kind.__members__.values() or payload_bytes > PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"not a frame: {bytes(raw)!r}")
        return Header(Kind(kind), payload_bytes, first, second)


def frame(kind: Kind, first: int, second: int = 0, payload: bytes = b"") -> bytes:
    """A frame as it is sent."""
    return _FORM.pack(kind, len(payload), first, second) + payload
