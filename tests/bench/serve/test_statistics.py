"""Figures of a run, against numpy and against timings whose figures are known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from baton.bench.serve.client import RequestTiming, parse_slo, parse_time, percentiles_of
from baton.bench.serve.load import LoadSpec, TokenRange, arrivals, make_requests, parse_lengths, parse_rate
from baton.bench.serve.report import summarise
from baton.errors import ConfigError


def timing(intended_s: float, first_s: float, num: int, gap_s: float, **more) -> RequestTiming:
    stamps = tuple(first_s + gap_s * index for index in range(num))
    values = {
        "sent_s": intended_s,
        "ended_s": stamps[-1],
        "stamps_s": stamps,
        "num_answer": num,
        "num_prompt": 5,
    }
    return RequestTiming(intended_s=intended_s, **{**values, **more})


def test_percentiles_are_those_of_numpy():
    source = random.Random(1)
    values = [source.expovariate(3) for _ in range(317)]
    found = percentiles_of(values)
    assert found is not None
    wanted = np.percentile(values, [50, 90, 95, 99])
    assert (found.p50_s, found.p90_s, found.p95_s, found.p99_s) == pytest.approx(tuple(wanted))
    assert found.mean_s == pytest.approx(sum(values) / len(values))
    assert (found.num, found.max_s) == (317, max(values))
    assert percentiles_of([]) is None


def test_percentiles_by_hand():
    found = percentiles_of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    # Ranks 0 to 4: the 90th percentile lies 0.6 of the way from the fourth value to the fifth.
    assert (found.p50_s, found.p90_s) == pytest.approx((3.0, 4.6))


def test_figures_of_one_request():
    one = timing(10.0, 10.5, 5, 0.1, sent_s=10.2, ended_s=11.0)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.0)
    assert one.late_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx((0.1,) * 4)
    assert one.tpot_s == pytest.approx(0.1)


def test_time_per_token_goes_by_the_servers_count():
    # Two tokens in each event: five events, ten tokens.
    one = replace(timing(0.0, 1.0, 5, 0.2), num_answer=10)
    assert one.tpot_s == pytest.approx(0.8 / 9)
    assert len(one.gaps_s) == 4


def test_request_without_text_has_no_first_token():
    one = RequestTiming(0.0, 0.0, 1.0, status="http 500")
    assert (one.ttft_s, one.tpot_s, one.gaps_s) == (None, None, ())


def test_throughput_and_failures():
    timings = [
        timing(0.0, 1.0, 4, 0.5),
        timing(1.0, 2.0, 4, 0.5),
        RequestTiming(2.0, 2.0, 8.0, status="http 429"),
    ]
    timings.append(RequestTiming(3.0, 3.0, 3.5, status="http 429"))
    timings.append(RequestTiming(3.0, 3.0, 3.5, status="disconnected"))
    found = summarise(timings)
    assert (found.num_requests, found.num_ok) == (5, 2)
    assert found.failures == {"http 429": 2, "disconnected": 1}
    # From the first intended sending to the last end, which was a failure's.
    assert found.duration_s == pytest.approx(8.0)
    assert found.requests_per_s == pytest.approx(2 / 8)
    assert found.answer_tokens_per_s == pytest.approx(8 / 8)
    assert found.goodput_per_s is None
    assert found.spreads["e2e"].num == 2  # failures are fast, and no part of any figure


def test_goodput_counts_what_keeps_every_bound():
    slo = parse_slo("ttft=1s,itl=200ms")
    fast, late_start = timing(0.0, 0.9, 3, 0.1), timing(0.0, 1.1, 3, 0.1)
    one_gap = replace(fast, stamps_s=(0.5, 0.6, 0.9))
    failed = replace(fast, status="disconnected")
    assert [one.is_good(slo) for one in (fast, late_start, one_gap, failed)] == [True, False, False, False]
    # A mean would have let the gap of 300 ms pass.
    assert one_gap.is_good(parse_slo("ttft=1s,tpot=200ms"))
    found = summarise([fast, late_start, one_gap, failed], slo)
    assert found.num_good == 1
    assert found.goodput_per_s == pytest.approx(1 / found.duration_s)


def test_unknown_figure_keeps_no_bound():
    one = timing(0.0, 0.1, 3, 0.1)
    assert not one.is_good(parse_slo("tth=10s"))
    assert replace(one, tth_s=0.5).is_good(parse_slo("tth=10s"))


def stalled_run() -> list[RequestTiming]:
    """A server that stalls for 5 s; requests are due every 0.1 s, and one at a time is in flight."""
    timings, free_s = [], 0.0
    for number in range(100):
        intended_s = number * 0.1
        sent_s = max(intended_s, free_s)
        served_s = 5.0 if number == 10 else 0.05
        free_s = sent_s + served_s
        timings.append(RequestTiming(intended_s, sent_s, free_s, (free_s,), num_answer=1))
    return timings


def test_open_loop_counts_from_the_intended_time():
    """Accounting from the sending, the usual mistake, sees one slow request; the clients saw most of them."""
    timings = stalled_run()
    right = summarise(timings).spreads["ttft"]
    broken = summarise([replace(each, intended_s=each.sent_s) for each in timings]).spreads["ttft"]
    assert right.p90_s > 4.0
    assert broken.p90_s < 0.1
    assert summarise(timings).spreads["late"].max_s == pytest.approx(4.9)


def test_arrivals_are_poisson_and_repeatable():
    load = LoadSpec(4000, TokenRange(1, 1), TokenRange(1, 1), rate=20.0, seed=3)
    times = arrivals(load)
    assert times == arrivals(load) != arrivals(replace(load, seed=4))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # of an exponential law the two are equal
    assert set(arrivals(replace(load, rate=math.inf))) == {0.0}


def test_prompts_have_their_lengths_and_share_what_they_should():
    load = LoadSpec(50, TokenRange(20, 40), TokenRange(3, 5), num_shared=12, seed=1, num_warmup=4)
    warmup, run = make_requests(load, 5000)
    assert (len(warmup), len(run)) == (4, 50)
    assert {len(each.prompt) for each in run} <= set(range(20, 41))
    assert {each.num_answer for each in run} == {3, 4, 5}
    assert len({each.prompt[:12] for each in run + warmup}) == 1
    assert len({each.prompt[12:16] for each in run + warmup}) == 54
    assert min(min(each.prompt) for each in run) >= 300
    assert max(max(each.prompt) for each in run) < 5000
    assert make_requests(load, 5000) == (warmup, run)
    _, texts = make_requests(load, 0)
    assert {len(each.prompt.split(" ")) for each in texts} <= set(range(20, 41))
    # How many warm up must not change what is measured.
    assert make_requests(replace(load, num_warmup=0), 5000)[1] == run


def test_small_vocabulary_is_used_whole():
    _, run = make_requests(LoadSpec(50, TokenRange(40, 40), TokenRange(1, 1)), 64)
    assert {token for each in run for token in each.prompt} == set(range(64))


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_lengths, "512", TokenRange(512, 512)),
        (parse_lengths, "128:1024", TokenRange(128, 1024)),
        (parse_rate, "inf", math.inf),
        (parse_rate, "2.5", 2.5),
        (parse_time, "200ms", 0.2),
        (parse_time, "1.5s", 1.5),
    ],
)
def test_options_are_read(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_lengths, text) for text in ("", "0", "5:3", "a", "1:2:3", "-4")),
        *((parse_rate, text) for text in ("0", "-1", "nan", "fast")),
        *((parse_time, text) for text in ("5", "0ms", "5 min", "-1s")),
        *((parse_slo, text) for text in ("ttft", "ttft=5", "speed=5ms", "ttft=5ms,ttft=6ms", "")),
    ],
)
def test_options_that_make_no_sense_are_refused(parse, text):
    with pytest.raises(ConfigError, match="cannot be"):
        parse(text)


def test_shared_prefix_has_to_fit():
    with pytest.raises(ConfigError, match="prefix of 20 tokens does not fit prompts of 10:30"):
        LoadSpec(1, TokenRange(10, 30), TokenRange(1, 1), num_shared=20)
