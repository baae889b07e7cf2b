"""The load generator against a server whose delays, refusals and lost connections are known."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from itertools import pairwise
from time import sleep

import pytest
from tests.bench.serve.scripted import Script, scripted

from baton.bench.serve.client import BenchRequest, OpenAIEndpoint, ask, latest_handoff, make_session
from baton.bench.serve.load import ClientMeter, LoadSpec, TokenRange, drive
from baton.bench.serve.report import summarise
from baton.cli import main

LOAD = LoadSpec(6, TokenRange(8, 8), TokenRange(4, 4), concurrency=2, num_warmup=0)


def run(script: Script, load: LoadSpec = LOAD, kind: str = "completions", vocabulary: int = 500, **more):
    with scripted(script) as url:
        return asyncio.run(drive(OpenAIEndpoint(url, kind=kind, **more), load, vocabulary))


def test_known_delays_are_found():
    found = run(Script(first_s=0.2, gap_s=0.05))
    summary = summarise(found.timings)
    assert (summary.num_ok, summary.failures) == (6, {})
    # Sleeping takes at least as long as asked; a loaded machine only adds.
    assert summary.spreads["ttft"].p50_s >= 0.2
    assert summary.spreads["itl"].p50_s > 0
    assert summary.spreads["e2e"].p50_s >= 0.35
    for timing in found.timings:
        assert len(timing.stamps_s) == 4
        assert (timing.num_prompt, timing.num_cached, timing.num_answer) == (7, 3, 4)
        assert timing.ttft_s < timing.e2e_s
    assert summary.num_answer == 24


def test_bodies_are_what_the_api_wants():
    script = Script()
    run(script, api_key="a-key-of-ours")
    body = script.bodies[0]
    assert body["model"] == "scripted"  # the endpoint was asked for it
    assert len(body["prompt"]) == 8
    assert all(isinstance(token, int) for token in body["prompt"])
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert set(script.keys) == {"Bearer a-key-of-ours"}


def test_chat_does_not_count_the_role_as_text():
    script = Script(first_s=0.2)
    found = run(script, kind="chat", vocabulary=0)
    # The role comes at once: who counts it sees a first token of a few milliseconds.
    assert all(timing.ttft_s >= 0.2 and len(timing.stamps_s) == 4 for timing in found.timings)
    assert script.bodies[0]["messages"][0]["role"] == "user"


def test_failures_are_counted_by_what_they_were():
    odd = {0: "http 429", 1: "cut", 2: "error", 3: "silent", 4: "http 429", 5: "http 503"}
    found = run(Script(odd=odd), replace(LOAD, num_requests=8, concurrency=1))
    summary = summarise(found.timings)
    assert summary.num_ok == 2
    assert summary.failures == {
        "http 429": 2,
        "disconnected": 1,
        "error event: PEER_LOST": 1,
        "ended without [DONE]": 1,
        "http 503": 1,
    }
    # What a failed request had streamed before does not count as output.
    assert summary.num_answer == 8


def test_slow_answers_time_out():
    found = run(Script(first_s=30.0), replace(LOAD, num_requests=1), timeout_s=0.3)
    assert [timing.status for timing in found.timings] == ["timed out"]


def test_nobody_listens():
    load = replace(LOAD, num_requests=2)
    found = asyncio.run(drive(OpenAIEndpoint("http://127.0.0.1:9", model="m"), load, 500))
    assert summarise(found.timings).failures == {"not connected": 2}


def test_concurrency_is_kept_and_used():
    script = Script(first_s=0.05, num_together=3)
    run(script, replace(LOAD, num_requests=9, concurrency=3), timeout_s=60.0)
    assert script.num_at_once_max == 3


def test_open_loop_does_not_wait_for_answers():
    # A closed loop would wait for the first answer, which comes when all have asked.
    script = Script(num_together=6)
    found = run(script, replace(LOAD, num_requests=6, concurrency=0, rate=20.0), timeout_s=60.0)
    assert script.num_at_once_max == 6
    assert all(earlier.intended_s < later.intended_s for earlier, later in pairwise(found.timings))


def test_waiting_for_a_place_counts_in_an_open_loop():
    """Requests are due at once and one is in flight: the last waits for all before it, and says so."""
    found = run(Script(first_s=0.2), replace(LOAD, num_requests=4, concurrency=1, rate=1000.0))
    last = found.timings[-1]
    assert last.late_s >= 0.5
    assert last.ttft_s >= 0.7
    assert last.stamps_s[0] - last.sent_s < last.ttft_s - 0.5


def test_timelines_are_asked_for_where_there_are_any():
    found = run(Script(tth_s=0.125))
    assert [timing.tth_s for timing in found.timings] == [0.125] * 6
    assert summarise(found.timings).spreads["tth"].p50_s == 0.125
    assert [timing.tth_s for timing in run(Script()).timings] == [None] * 6


def test_handoff_of_a_timeline():
    assert latest_handoff({"jobs": [{"figures": {"tth_s": 1}}, {"figures": {"tth_s": 2.5}}]}) == 2.5
    assert latest_handoff({"jobs": [{"figures": None}]}) is None
    assert latest_handoff([]) is None


def test_watch_sees_a_loop_that_is_held_up():
    async def held_up(wait_s: float):
        async with ClientMeter() as meter:
            await asyncio.sleep(0.1)
            sleep(wait_s)  # the event loop gets nothing done meanwhile
            await asyncio.sleep(0.1)
        return meter.overhead

    found = asyncio.run(held_up(0.5))
    assert found.lag is not None
    assert found.lag.max_s >= 0.4
    assert found.wall_s >= 0.7
    assert "of a core" in str(found)


def command(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "serve", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_command_prints_writes_and_draws(tmp_path, monkeypatch, capsys):
    path, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    script = Script(first_s=0.01, odd={4: "http 503"}, vocabulary=400)
    words = ["--requests", "5", "--concurrency", "1", "--input-tokens", "4:6", "--output-tokens", "3"]
    with scripted(script) as url:
        code = command(
            monkeypatch,
            "--url",
            url + "/v1",
            *words,
            "--slo",
            "ttft=60s",
            "--json",
            str(path),
            "--png",
            str(picture),
        )
    out = capsys.readouterr().out
    assert code == 0
    assert "failed: 1 x http 503" in out
    assert "the client itself took" in out
    assert "goodput (ttft 60000 ms)" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(path.read_text())
    assert {"command", "commit", "machine", "date"} < set(found)
    summary = found["results"]["summary"]
    assert (summary["num_ok"], summary["num_good"], summary["failures"]) == (4, 4, {"http 503": 1})
    assert len(found["results"]["traces"]) == 5
    assert found["results"]["load"]["rate"] is None  # JSON has no infinity
    # One to see what the server takes and two to warm up, which appear in no figure.
    assert len(script.bodies) == 8
    assert max(max(body["prompt"]) for body in script.bodies) < 400


def test_command_fails_if_every_request_did(tmp_path, monkeypatch, capsys):
    script = Script(odd=dict.fromkeys(range(9), "http 503"))
    words = ["--requests", "3", "--warmup", "0", "--json", str(tmp_path / "x.json")]
    with scripted(script) as url:
        assert command(monkeypatch, "--url", url, *words) == 1
    assert "failed: 3 x http 503" in capsys.readouterr().out


def test_warming_up_tells_what_every_request_would_get(tmp_path, monkeypatch, capsys):
    with scripted(Script(odd=dict.fromkeys(range(9), "http 401"))) as url:
        assert command(monkeypatch, "--url", url, "--json", str(tmp_path / "x.json")) == 1
    assert "http 401; check --url, --model" in capsys.readouterr().err


@pytest.mark.parametrize("prompts", ["auto", "tokens"])
def test_server_that_takes_text_alone(tmp_path, monkeypatch, capsys, prompts):
    script = Script(vocabulary=0)
    words = ["--requests", "2", "--prompts", prompts, "--json", str(tmp_path / "x.json")]
    with scripted(script) as url:
        code = command(monkeypatch, "--url", url, *words)
    if prompts == "tokens":
        assert code == 1
        assert "takes no token ids; use --prompts text" in capsys.readouterr().err
        return
    assert code == 0
    assert {len(body["prompt"].split(" ")) for body in script.bodies} == {256}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--url", "127.0.0.1:1"], "write it like http://"),
        (["--url", "http://127.0.0.1:1", "--endpoint", "embeddings"], "use completions or chat"),
        (["--url", "http://h:1", "--endpoint", "chat", "--prompts", "tokens"], "takes no token ids"),
        (["--url", "http://127.0.0.1:1", "--rate", "0"], "rate '0' cannot be used"),
        (["--shared-prefix", "300"], "does not fit prompts of 256"),
    ],
)
def test_misuse_is_one_line(monkeypatch, capsys, words, text):
    assert command(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.strip().splitlines()) == 1


def test_unreachable_endpoint_is_one_line(monkeypatch, capsys):
    assert command(monkeypatch, "--url", "http://127.0.0.1:9") == 1
    error = capsys.readouterr().err
    assert "cannot be reached" in error
    assert len(error.strip().splitlines()) == 1


def test_an_answer_can_be_left():
    """What came of it counts as whole, and the server hears that nobody reads on."""
    script = Script(gap_s=0.05)

    async def leave(url: str):
        over = asyncio.Event()
        async with make_session(OpenAIEndpoint(url)) as session:
            asking = asyncio.create_task(
                ask(session, OpenAIEndpoint(url, "m"), BenchRequest((1, 2), 5000), None, over)
            )
            while script.num_sent < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            over.set()
            timing = await asking
            async with asyncio.timeout(300):
                while script.num_at_once:
                    await asyncio.sleep(0.01)
        return timing

    with scripted(script) as url:
        timing = asyncio.run(leave(url))
    assert timing.is_ok
    assert 1 <= len(timing.stamps_s) < 5000
