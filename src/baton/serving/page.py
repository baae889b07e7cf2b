"""The router's page for people: `GET /`, and the snapshots that it draws, as server-sent events.

Nothing is computed while no page is open. While one is, about once a second: one snapshot for all open pages,
out of what the router has anyway; and a sample of hand-overs, fetched from a few prefill instances at a time.
Every list in a snapshot is bounded, whatever the number of instances and requests.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import chain, islice
from time import monotonic
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from baton.engine.trace import HandoffTrace, RequestTrace
from baton.observe import Interval, Timeline, Track, merged
from baton.serving.fleet import Fleet, FleetInstance, UpstreamError, fetch
from baton.serving.http import EventStream, data_event, failure
from baton.serving.metrics import NUMBER, AttemptLog
from baton.session.registry import Role

TICK_S = 1.0
WRITE_S_MAX = 10.0
NUM_PAGES_MAX = 16
NUM_SHOWN_MAX = 40
"""Of requests, running and answered."""
NUM_INSTANCES_MAX = 256
NUM_LISTED = 2
"""Instances that are asked for their latest requests in one tick, in turn."""
NUM_DRAWN = 2
"""Hand-overs of one instance that are fetched with the work of their ranks in one tick."""
NUM_UNDRAWN_MAX = 64
DRAWING_SHARE = 0.05
"""Of one core, at most, to draw hand-overs; those of large layouts are drawn less often."""
NUM_HANDOFFS_MAX = 24
NUM_POINTS_MAX = 512
NUM_REASONS_MAX = 4
NUM_TRACKS_MAX = 40
NUM_SPANS_MAX = 64
NUM_LANES_MAX = 4
NUM_RANKS_MAX = 32
"""A byte matrix with more rows or columns is folded."""
TEXT_CHARACTERS_MAX = 300
FETCH_S_MAX = 3.0
FETCH_BYTES_MAX = 1 << 20
"""A longer timeline is left out: to decode it would hold up requests."""
SAME_CLOCK_S = 0.005
"""Monotonic clocks that differ less are those of one machine."""

_HASHED = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


# ---- what instances answer


class _Job(msgspec.Struct, frozen=True):
    side: str
    transfer: str | None = None
    figures: dict[str, float] | None = None
    unpipelined: tuple[str, ...] = ()
    trace: RequestTrace | None = None


class _Clock(msgspec.Struct, frozen=True):
    monotonic_s: float = 0.0
    unix_s: float = 0.0


class _Request(msgspec.Struct, frozen=True):
    """One request of /v1/timelines; `clock` and traces only where it was asked for alone."""

    id: str
    created: int = 0
    num_prompt_tokens: int = 0
    jobs: tuple[_Job, ...] = ()
    clock: _Clock = _Clock()


class _Listing(msgspec.Struct, frozen=True):
    data: tuple[_Request, ...] = ()


_listing = msgspec.json.Decoder(_Listing)
_request = msgspec.json.Decoder(_Request)


# ---- one hand-over


def _read_handoff(*bodies: bytes) -> tuple[dict[str, Any] | None, float]:
    """What is shown of a request, from what prefill and decode answered, and the seconds that it took."""
    began_s, shown = time.thread_time(), None
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        source, target = map(_request.decode, bodies)
        handoff = _traced(source, target)
        if handoff is not None:
            shown = {"time_s": source.created, "num_prompt_tokens": source.num_prompt_tokens}
            shown |= drawing(handoff)
    return shown, time.thread_time() - began_s


def _traced(source: _Request, target: _Request) -> HandoffTrace | None:
    """The first job of a request that both sides have traced, by the clock of the source."""
    traces = {job.transfer: job.trace for job in target.jobs if job.side == "target" and job.trace}
    shift_s = (target.clock.unix_s - target.clock.monotonic_s) - (
        source.clock.unix_s - source.clock.monotonic_s
    )
    if abs(shift_s) < SAME_CLOCK_S:
        shift_s = 0.0
    for job in source.jobs:
        prefill, decode = job.trace, traces.get(job.transfer)
        if job.side == "source" and prefill and decode and prefill.prompt_s and decode.is_handed_over:
            stepped_s = decode.stepped_s and decode.stepped_s + shift_s
            decode = replace(decode, settled_s=decode.settled_s + shift_s, stepped_s=stepped_s)
            return HandoffTrace(prefill.arrived_s, prefill.token_s, prefill, decode)
    return None


def drawing(handoff: HandoffTrace) -> dict[str, Any]:
    """The timeline as `baton demo` draws it, and the bytes by rank pair; both of bounded size."""
    figures, tracks = handoff.figures(), dict[Track, list[Interval]]()
    for interval in handoff.timeline("").intervals:
        tracks.setdefault(interval.track, []).append(interval)
    busiest_s = figures.transfer_s
    return {
        **msgspec.to_builtins(figures),
        "hidden": max(0.0, 1 - figures.exposed_s / busiest_s) if busiest_s else None,
        "prompt_s": handoff.prefill.prompt_s - handoff.asked_s,
        "num_cached": handoff.prefill.num_cached,
        "num_held": handoff.decode.num_held,
        "unpipelined": [
            reason[:TEXT_CHARACTERS_MAX] for reason in dict.fromkeys(handoff.prefill.unpipelined)
        ],
        "num_tracks": len(tracks),
        "tracks": [_drawn_track(*entry) for entry in islice(tracks.items(), NUM_TRACKS_MAX)],
        "matrix": _matrix(handoff.prefill),
    }


def _drawn_track(track: Track, intervals: Sequence[Interval]) -> dict[str, Any]:
    lanes = Timeline("", tuple(intervals)).lanes(track)
    if len(lanes) > NUM_LANES_MAX or len(intervals) > NUM_SPANS_MAX:
        lanes = [_joined(track, intervals)]
    spans = [
        [round(span.start_s, 6), round(span.stop_s, 6), lane, span.name]
        for lane, intervals in enumerate(lanes)
        for span in intervals
    ]
    return {"group": track.group, "name": track.name, "num_lanes": len(lanes), "spans": spans}


def _joined(track: Track, intervals: Sequence[Interval]) -> list[Interval]:
    """When the track was busy; gaps too small to be seen are closed."""
    gap_s = max(span.stop_s for span in intervals) / NUM_SPANS_MAX
    pieces = merged((span.start_s, span.stop_s + gap_s) for span in intervals)
    return [Interval(track, track.name, start_s, stop_s - gap_s) for start_s, stop_s in pieces]


def _matrix(trace: RequestTrace) -> dict[str, Any]:
    """Bytes from source rank to target rank; `fold` neighbouring ranks share a row and a column."""
    targets = [copy.target_rank for copies in trace.copies.values() for copy in copies]
    num_rows, num_columns = max(trace.copies, default=-1) + 1, max(targets, default=-1) + 1
    fold = -(-max(num_rows, num_columns, 1) // NUM_RANKS_MAX)
    cells: dict[tuple[int, int], int] = {}
    for rank, copies in trace.copies.items():
        for copy in copies:
            key = (rank // fold, copy.target_rank // fold)
            cells[key] = cells.get(key, 0) + copy.num_bytes
    sizes = {"fold": fold, "num_rows": num_rows, "num_columns": num_columns}
    return {**sizes, "cells": [[*key, num_bytes] for key, num_bytes in sorted(cells.items())]}


# ---- the sample


class HandoffSample:
    """The latest hand-overs of a few instances at a time."""

    def __init__(self, fleet: Fleet, log: AttemptLog, session: aiohttp.ClientSession) -> None:
        self.points: deque[tuple[float, float | None, float]] = deque(maxlen=NUM_POINTS_MAX)
        """When, the share of the transfer that was hidden, the exposed seconds."""
        self.reasons: deque[tuple[str, ...]] = deque(maxlen=NUM_POINTS_MAX)
        """Why each of these was not pipelined; empty where it was."""
        self.drawn: deque[tuple[int, bytes]] = deque(maxlen=NUM_HANDOFFS_MAX)
        """Numbered, as JSON."""
        self._fleet = fleet
        self._log = log
        self._session = session
        self._turn = 0
        self._listed: dict[str, frozenset[str]] = {}
        """By instance: the hand-overs that it listed last."""
        self._undrawn: deque[str] = deque(maxlen=NUM_UNDRAWN_MAX)
        """Hand-overs to draw once their requests have ended: only then decode has recorded them."""
        self._num_drawn = 0
        self._rests_until_s = 0.0

    async def take(self) -> None:
        """One tick: lists the requests of the next instances, and fetches the newest hand-overs of these."""
        prefills = self._fleet.able(Role.PREFILL)
        turns = range(self._turn, self._turn + min(NUM_LISTED, len(prefills)))
        chosen = [prefills[turn % len(prefills)] for turn in turns]
        self._turn = turns.stop
        listed = await asyncio.gather(*map(self._list, chosen))
        before = {name: ids for name, ids in self._listed.items() if name in self._fleet.instances}
        self._listed = before
        for instance, requests in zip(chosen, listed, strict=True):
            done = {request.id: request for request in requests if _source_figures(request) is not None}
            new = [request for name, request in done.items() if name not in before.get(instance.name, ())]
            before[instance.name] = frozenset(done)
            for request in reversed(new):
                self._add_point(request)
            self._undrawn.extend(request.id for request in reversed(new[:NUM_DRAWN]))
        ended = [identity for identity in self._undrawn if self._has_ended(identity)]
        for identity in ended:
            self._undrawn.remove(identity)
        for identity in ended[-NUM_LISTED * NUM_DRAWN :]:
            if monotonic() >= self._rests_until_s:
                await self._draw(identity)

    def _has_ended(self, identity: str) -> bool:
        """Long enough ago that decode has freed its pages too, or so long ago that it is forgotten."""
        attempts = self._log.attempts(identity)
        return not attempts or 0 < attempts[-1].ended_s < time.time() - TICK_S

    async def _list(self, instance: FleetInstance) -> Sequence[_Request]:
        """Its latest requests, the newest first."""
        body = await self._get(instance, "/v1/timelines")
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _listing.decode(body).data
        return ()

    async def _get(self, instance: FleetInstance, path: str) -> bytes:
        """Empty where there is no answer, or one that is too long."""
        with suppress(UpstreamError):
            status, body = await fetch(
                self._session, instance.base + path, FETCH_S_MAX, bytes_max=FETCH_BYTES_MAX
            )
            return body if status == 200 else b""
        return b""

    def _add_point(self, request: _Request) -> None:
        figures = _source_figures(request) or {}
        self.points.append((request.created, figures.get("efficiency"), round(figures["exposed_s"], 6)))
        reasons = dict.fromkeys(
            NUMBER.sub("N", reason[:TEXT_CHARACTERS_MAX])
            for job in request.jobs
            for reason in job.unpipelined
        )
        self.reasons.append(tuple(reasons)[:NUM_REASONS_MAX])

    async def _draw(self, identity: str) -> None:
        attempts = self._log.attempts(identity)
        names = attempts[-1].names if attempts else ()
        pair = [self._fleet.instances[name] for name in reversed(names) if name in self._fleet.instances]
        if len(pair) != 2:
            return
        path = f"/v1/timelines/{quote(identity, safe='')}"
        bodies = await asyncio.gather(*(self._get(instance, path) for instance in pair))
        # On a thread: the event loop has requests to forward meanwhile.
        shown, used_s = await asyncio.to_thread(_read_handoff, *bodies)
        self._rests_until_s = monotonic() + used_s / DRAWING_SHARE
        if shown is not None:
            self._num_drawn += 1
            shown |= {
                "number": self._num_drawn,
                "id": identity,
                "names": [instance.name for instance in pair],
                "layouts": [instance.roster.layout for instance in pair],
            }
            self.drawn.append((self._num_drawn, msgspec.json.encode(shown)))


def _source_figures(request: _Request) -> dict[str, float] | None:
    """Of its first job that was handed over."""
    figures = (job.figures for job in request.jobs if job.side == "source" and job.figures)
    return next((values for values in figures if "exposed_s" in values), None)


# ---- the page


class RouterPage:
    """The routes of the page."""

    def __init__(
        self,
        fleet: Fleet,
        log: AttemptLog,
        state: Callable[[], dict[str, Any]],
        session: aiohttp.ClientSession | None,
    ) -> None:
        """`state` is what only the router knows; without a session no hand-overs are fetched."""
        self.routes = [web.get("/", self._get_page), web.get("/events", self._get_events)]
        self._fleet = fleet
        self._log = log
        self._state = state
        self._sample = None if session is None else HandoffSample(fleet, log, session)
        self._sampling: asyncio.Task[None] | None = None
        self._snapshot = b""
        self._snapshot_s = -TICK_S
        self._num_pages = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends the streams of open pages."""
        self._closing.set()
        if self._sampling is not None:
            self._sampling.cancel()

    async def _get_page(self, request: web.Request) -> web.StreamResponse:
        page = page_text()
        return web.Response(text=page, content_type="text/html", headers=_page_headers(page))

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        if self._num_pages >= NUM_PAGES_MAX:
            raise failure("QUEUE_FULL", f"{self._num_pages} pages are open already; close one")
        stream = EventStream(request, f"page-{secrets.token_hex(8)}", WRITE_S_MAX)
        self._num_pages += 1
        num_sent = 0
        try:
            while not self._closing.is_set():
                self._tick()
                drawn = self._sample.drawn if self._sample is not None else ()
                parts = [self._snapshot, *(shown for number, shown in drawn if number > num_sent)]
                num_sent = drawn[-1][0] if drawn else 0
                await stream.write(data_event(b"[" + b",".join(parts) + b"]"))
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._closing.wait()
            return await stream.end(b"")
        finally:
            self._num_pages -= 1

    def _tick(self) -> None:
        """Of all open pages, the first that asks after a tick makes the snapshot."""
        if monotonic() - self._snapshot_s < TICK_S / 2:
            return
        self._snapshot_s = monotonic()
        self._snapshot = msgspec.json.encode(self._describe())
        if self._sample is not None and (self._sampling is None or self._sampling.done()):
            self._sampling = asyncio.get_running_loop().create_task(self._sample.take())

    def _describe(self) -> dict[str, Any]:
        instances = sorted(
            self._fleet.instances.values(), key=lambda known: (known.is_able, known.role.value, known.name)
        )
        now_s, sample = monotonic(), self._sample
        return {
            "time_s": time.time(),
            "has_timelines": sample is not None,
            **self._state(),
            "num_instances": len(instances),
            "instances": [
                {
                    **instance.summary(),
                    "problem": instance.health.problem[:TEXT_CHARACTERS_MAX],
                    "heard_s": round(now_s - instance.health.heard_s, 1),
                }
                for instance in instances[:NUM_INSTANCES_MAX]
            ],
            "answered": list(self._answered()),
            "failures": [
                {
                    "id": count.id,
                    "names": count.record.names[::-1],
                    "text": count.record.failure[:TEXT_CHARACTERS_MAX],
                    "time_s": count.record.ended_s or count.record.began_s,
                    "number": count.number,
                }
                for count in reversed(self._log.failures.values())
            ],
            "points": [] if sample is None else list(sample.points),
            "reasons": Counter(chain.from_iterable(() if sample is None else sample.reasons)),
        }

    def _answered(self) -> Iterable[dict[str, Any]]:
        for identity, record in islice(self._log.latest(), NUM_SHOWN_MAX):
            if record.ended_s and not record.failure:
                yield {
                    "id": identity,
                    "names": record.names[::-1],
                    "local": record.local_reason,
                    "time_s": record.ended_s,
                    "first_s": round(record.answered_s - record.began_s, 4) if record.is_streamed else None,
                    "total_s": round(record.ended_s - record.began_s, 4),
                }


@cache
def page_text() -> str:
    return files("baton.serving").joinpath("page.html").read_text(encoding="utf-8")


def _page_headers(page: str) -> dict[str, str]:
    """Only the page's own script and style run, and it can reach nothing but this router."""
    sources: dict[str, str] = {}
    for match in _HASHED.finditer(page):
        digest = base64.b64encode(hashlib.sha256(match[2].encode()).digest()).decode()
        sources[match[1]] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Server": "baton",
    }
