"""Work on a rank's own memory, done beside the driver: packing, unpacking and checksums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from baton.plan import Chunk, Pack, Spans, Tables
from baton.plan.outline import outline
from baton.plan.sides import canonical, parts_of, places_in_staging, target_steps
from baton.plan.tokens import Ints
from baton.session.loads import Terms
from baton.transport import Bytes
from baton.transport.packing import pack, unpack


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk of one source rank as its target was told of it."""

    pair: tuple[int, int]
    chunk: Chunk
    staged_at: int | None
    """Where it lies in the staging lease; None: nowhere."""
    checksums: Mapping[str, bytes] | None


def run_packs(packs: Iterable[Pack], buffers: Mapping[str, Bytes], staging: Bytes) -> None:
    """Gathers a chunk into staging."""
    view = torch.from_numpy(staging)
    for step in packs:
        pack(step, torch.from_numpy(buffers[step.buffer]), view)


def check_and_unpack(
    terms: Terms, arrived: Arrived, staging: Bytes | None, buffers: Mapping[str, Bytes]
) -> str:
    """Brings a chunk home; answers what is wrong with it, or nothing."""
    parts = parts_of(terms.plan, terms.prompt, Tables({}, terms.tables), arrived.chunk, arrived.pair)
    if not parts:
        return ""
    mode = terms.modes[arrived.pair]
    steps = target_steps(parts, mode)
    places = places_in_staging(parts, mode)
    place: Bytes | None = None
    if places:
        num_bytes = max(stop for _, stop in places.values())
        start = -1 if arrived.staged_at is None else arrived.staged_at
        if staging is None or start < 0 or start + num_bytes > len(staging):
            return f"{num_bytes} bytes have to be unpacked, but are said to lie at {arrived.staged_at}"
        place = staging[start : start + num_bytes]
    if terms.is_verified:
        found = {name: _sum(place[a:b]) for name, (a, b) in places.items()} if place is not None else {}
        for name, (buffer, spans) in canonical(parts, "target").items():
            if name not in found:
                found[name] = _sum(_gathered(buffers[buffer], name, spans))
        if found != arrived.checksums:
            wrong = sorted(name for name in found if (arrived.checksums or {}).get(name) != found[name])
            return f"checksums of {', '.join(wrong) or 'the chunk'} differ"
    if place is not None:
        view = torch.from_numpy(place)
        for step in steps:
            unpack(step, view, torch.from_numpy(buffers[step.buffer]))
    return ""


def source_checksums(
    terms: Terms, source_rank: int, table: Mapping[str, Ints], chunk: Chunk, buffers: Mapping[str, Bytes]
) -> dict[int, dict[str, bytes]]:
    """By target rank and component: the checksum of a chunk in canonical order and the wire's dtype."""
    found = {}
    tables = Tables({source_rank: table}, terms.tables)
    for pair in outline(terms.plan, terms.prompt).pairs_of_source(source_rank):
        parts = parts_of(terms.plan, terms.prompt, tables, chunk, pair)
        if parts:
            found[pair[1]] = {
                name: _sum(_gathered(buffers[buffer], name, spans))
                for name, (buffer, spans) in canonical(parts, "source").items()
            }
    return found


def _gathered(buffer: Bytes, name: str, spans: Spans) -> Bytes:
    """A component of a chunk in canonical order."""
    found = np.empty(spans.num_bytes, dtype=np.uint8)
    pack(Pack(0, 0, name, "", spans), torch.from_numpy(buffer), torch.from_numpy(found))
    return found


def _sum(raw: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(raw).data)
