"""Server-sent events, both ways: what a watch consists of."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.session.registry.messages import Change, Refusal, RegistryError, Topology

BEAT = b": beat\n\n"
EVENT_BYTES_MAX = 16 << 20

_TYPES: dict[str, type[Topology | Change]] = {"topology": Topology, "change": Change}


def encode(event: Topology | Change) -> bytes:
    """One event; JSON has no line feeds of its own, so the data is one line."""
    name = "topology" if isinstance(event, Topology) else "change"
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event.id.encode(),
        name.encode(),
        msgspec.json.encode(event),
    )


class EventReader:
    """Events from bytes as they come; comments, and events of names not known here, are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Topology | Change]:
        """The events that these bytes complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise RegistryError(
                Refusal.UNREACHABLE, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this a registry?"
            )
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
            kind = _TYPES.get(fields.get(b"event", b"").decode("utf-8", "replace"))
            if kind is not None:
                yield _decode(kind, fields.get(b"data", b""))


def _decode(kind: type[Topology | Change], data: bytes) -> Topology | Change:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(
            Refusal.UNREACHABLE, f"an event cannot be read ({error}); is this a registry?"
        ) from None
