"""Timelines of requests: as data, as Perfetto traces and as pictures."""

from baton.observe.perfetto import trace
from baton.observe.timeline import Interval, Timeline, Track, covered_s

__all__ = ["Interval", "Timeline", "Track", "covered_s", "trace"]
