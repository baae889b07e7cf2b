"""What a client saw of one request, and the figures that follow from it.

Times count from the moment at which a request was *intended* to be sent. A client that is held up, or that
waits for a free place, does not thereby make the server faster: what it lost is in every figure of the
request, and apart as `late_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from baton.bench.serve.options import Slo

OK = "ok"


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, by the client's monotonic clock."""

    intended_s: float
    sent_s: float
    ended_s: float
    stamps_s: tuple[float, ...] = ()
    """When each event that carried text, or a finish without any, was read."""
    status: str = OK
    """`ok`, or in few words what went wrong; equal words are counted together."""
    num_prompt: int = 0
    num_cached: int = 0
    num_answer: int = 0
    """Tokens as the server counts them; where it does not, the events."""
    id: str = ""
    tth_s: float | None = None
    """Request in to admitted on the target, by the server's clock; None where nobody says."""

    @property
    def is_ok(self) -> bool:
        """Whether the answer came whole."""
        return self.status == OK

    @property
    def late_s(self) -> float:
        """What the client itself held the request up."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """To the first text."""
        return self.stamps_s[0] - self.intended_s if self.stamps_s else None

    @property
    def e2e_s(self) -> float:
        """To the end of the answer."""
        return self.ended_s - self.intended_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between events, in order: the inter-token latencies."""
        stamps = self.stamps_s
        return tuple(later - earlier for earlier, later in pairwise(stamps))

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first, by the server's count of tokens."""
        if self.num_answer < 2 or not self.stamps_s:
            return None
        return (self.stamps_s[-1] - self.stamps_s[0]) / (self.num_answer - 1)

    def is_good(self, slo: Slo) -> bool:
        """Whether it was answered whole and within every bound; an unknown figure keeps none."""
        found = {
            "ttft": self.ttft_s,
            "itl": max(self.gaps_s, default=0.0),
            "tpot": self.tpot_s if self.num_answer > 1 else 0.0,
            "tth": self.tth_s,
            "e2e": self.e2e_s,
        }
        values = [(found[name], bound_s) for name, bound_s in slo.bounds]
        return self.is_ok and all(value is not None and value <= bound_s for value, bound_s in values)
