"""What a cradle and its parent say to each other about a rank."""

from __future__ import annotations

import struct

import msgspec

FATE = struct.Struct("<i")
"""On the descriptor of a rank's fate: first its pid, then its exit code, negative for a signal."""
NUM_DESCRIPTORS = 3
"""A rank's pipe, where its words go, and its fate."""


class Birth(msgspec.Struct, frozen=True):
    """What a rank starts with; the first message on its pipe."""

    name: str
    module: str
    """Its `main` is called with the pipe and the words."""
    words: tuple[str, ...]
    environment: dict[str, str]
