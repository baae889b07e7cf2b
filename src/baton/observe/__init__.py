"""What happened and when, as data that can be kept, exported and drawn."""

from baton.observe.perfetto import trace
from baton.observe.timeline import Interval, Timeline, Track, covered_s

__all__ = ["Interval", "Timeline", "Track", "covered_s", "trace"]
