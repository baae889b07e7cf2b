"""The suites' arithmetic on made-up timings, and the dummy instances behind the routers."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import dummy_instances
import interference
import pipelining
import pytest
import router
from deployments import BenchProcesses
from load_generator import Burst, is_complete, send_burst, take_turns
from rich.console import Console

from baton.bench.serve.client import RequestTiming
from baton.bench.serve.load import ClientOverhead, make_requests
from baton.errors import EngineError
from baton.serving.http import EventSplitter
from baton.session.registry.messages import check_member

CALM = ClientOverhead(1.0, 0.1, None)


def timing(*stamps_s: float, intended_s: float = 0.0, status: str = "ok") -> RequestTiming:
    ended_s = max((intended_s, *stamps_s))
    return RequestTiming(intended_s, intended_s, ended_s, stamps_s, status, num_answer=len(stamps_s))


def printed(table) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()


# Dummy instances.


def with_dummies(work):
    """Runs work(prefill, decode) before two dummy instances."""

    async def run():
        found = [
            await dummy_instances.listen(role, number) for number, role in enumerate(("prefill", "decode"))
        ]
        try:
            return await work(*(instance for instance, _ in found))
        finally:
            for _, server in found:
                server.close()

    return asyncio.run(run())


def test_dummies_speak_what_routers_ask():
    async def ask(prefill, decode):
        async with aiohttp.ClientSession() as session:
            pages = {}
            for path in ("/health", "/server_info", "/model_info", "/v1/models"):
                async with session.get(prefill.url + path) as response:
                    assert response.status == 200
                    pages[path] = await response.json()
            async with session.get(prefill.url + "/nowhere") as response:
                assert response.status == 404
            body = {"prompt": "a", "stream": True, "bootstrap_room": 1, "baton": {"tokens": True}}
            async with session.post(decode.url + "/v1/completions", json=body) as response:
                noted = await response.read()
            async with session.post(decode.url + "/v1/completions", json={"prompt": "a"}) as response:
                whole = await response.json()
            async with session.post(decode.url + "/v1/completions", data=b"{") as response:
                assert response.status == 400
            return pages, noted, whole, prefill

    pages, noted, whole, prefill = with_dummies(ask)
    told = pages["/server_info"]
    assert (told["role"], told["is_ready"], told["url"]) == ("prefill", True, prefill.url)
    assert pages["/model_info"]["is_generation"] is True
    assert len(whole["choices"][0]["text"].split()) == whole["usage"]["completion_tokens"]
    events = list(EventSplitter().feed(noted))
    assert events[-1].is_done
    assert [event.note.tokens for event in events[:-1]] == [
        (number,) for number in range(dummy_instances.NUM_EVENTS)
    ]
    assert [event.note.finish for event in events[:-1]] == [None] * 7 + ["length"]


def test_dummies_can_register():
    instance = dummy_instances.DummyInstance("decode-1", "decode", 4000, 4001)
    member = dummy_instances.member_of(instance)
    assert check_member(member) == 1
    assert (member.url, member.role.value) == ("http://127.0.0.1:4000", "decode")


def test_the_load_generator_counts_what_was_answered():
    async def work(prefill, decode):
        urls = {"one": prefill.url, "two": decode.url}
        turns = await take_turns(urls, 5, is_streamed=True)
        return turns, await send_burst(decode.url, 3, 0.3, is_streamed=False)

    turns, burst = with_dummies(work)
    assert {name: len(times) for name, times in turns.items()} == {"one": 5, "two": 5}
    assert burst.num_failed == 0
    assert burst.num_ok == len(burst.times_s) > 0
    assert burst.per_s == pytest.approx(burst.num_ok / burst.wall_s)


def refusing(num_good: int):
    """A protocol that answers so many requests well and the rest with 503."""

    class Refusing(asyncio.Protocol):
        left = num_good

        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            type(self).left -= 1
            status = b"200 OK" if type(self).left >= 0 else b"503 Busy"
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")

    return Refusing


def test_the_load_generator_sees_refusals():
    async def work():
        server = await asyncio.get_running_loop().create_server(refusing(3), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        burst = await send_burst(url, 1, 30.0, is_streamed=False)
        with pytest.raises(EngineError, match="did not answer 200"):
            await take_turns({"it": url}, 1, is_streamed=False)
        server.close()
        return burst

    burst = asyncio.run(work())
    assert (burst.num_ok, burst.num_failed) == (3, 1)


@pytest.mark.parametrize(
    ("answer", "is_it"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Len", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", True),
    ],
)
def test_complete_answers_are_told_from_parts(answer, is_it):
    assert is_complete(answer) is is_it


# The router.


def burst(per_s: float, num_failed: int = 0) -> router.RouterBurst:
    return router.RouterBurst(Burst(int(per_s), num_failed, 1.0, 0.1, (0.001,)), 0.9)


def routed(ours: list[float], theirs: list[float], num_failed: int = 0) -> router.RouterResult:
    times = {"direct": [0.001, 0.001, 0.9], "baton": [0.0015, 0.0019, 0.003], "sglang-router": [0.002] * 3}
    bursts = {
        "direct": [burst(9000)],
        "baton": [burst(value, num_failed) for value in ours],
        "sglang-router": [burst(value) for value in theirs],
    }
    return router.RouterResult(
        dict.fromkeys(router.KINDS, times), dict.fromkeys(router.KINDS, bursts), ([], [])
    )


def test_router_figures():
    found = routed([500, 900, 400], [1000, 1000, 1000])
    # Medians: one request that the machine held up changes neither.
    assert found.added_s("whole", "baton") == pytest.approx(0.0009)
    assert found.ratio("whole") == pytest.approx(0.5)
    assert found.cpu_s("whole", "direct") == pytest.approx(0.0001)
    figures = router.figures_of(found)["whole"]
    assert (figures["added_is_met"], figures["ratio_is_met"]) == (True, True)
    assert router.figures_of(routed([440] * 3, [1000] * 3))["streamed"]["ratio_is_met"] is False


def test_router_ratio_is_of_neighbours():
    """LoadSpec that comes and goes falls on both of a pair: the ratio of the medians would say 1."""
    found = routed([100, 200, 400], [200, 400, 100])
    assert found.ratio("whole") == pytest.approx(0.5)


def test_router_failures_are_not_right():
    assert router.is_right(routed([1], [1]))
    assert not router.is_right(routed([1], [1], num_failed=1))


def test_router_without_the_other_one():
    found = routed([10], [10])
    bursts = {kind: {name: each[name] for name in ("direct", "baton")} for kind, each in found.bursts.items()}
    alone = router.RouterResult(found.times_s, bursts, ([], []))
    assert alone.ratio("whole") is None
    assert router.figures_of(alone)["whole"]["ratio_is_met"] is None


# Pipelining.


def test_pipelining_gives_both_policies_the_same():
    sizes = pipelining.SIZES["cpu"]
    plan = list(pipelining._plan(pipelining.turns(sizes, 3), pipelining.POLICIES))
    counts = Counter((turn.part, policy) for turn, policy in plan)
    parts = [*(str(length) for length in sizes.lengths), "dialogue", "stress"]
    assert {part for part, _ in counts} == set(parts)
    assert all(counts[part, "off"] == counts[part, "cost"] for part in parts)
    assert counts["128", "cost"] == 3
    firsts = [policy for (_, policy) in plan[::2]]
    assert firsts.count("off") == pytest.approx(len(firsts) / 2, abs=1)  # who begins changes


def test_pipelining_prompts_share_no_beginning():
    sizes = pipelining.SIZES["cpu"]
    parts = [turn for turn in pipelining.turns(sizes, 2) if turn.load is not None]
    loads = [replace(turn.load, seed=turn.seed(0)) for turn in parts]
    wanted = [each for load in loads for group in make_requests(load, 20_000) for each in group]
    assert len({each.prompt[:16] for each in wanted}) == len(wanted) > 2 * 8 * len(sizes.lengths)


def test_pipelining_tables(tmp_path: Path):
    timings = {}
    for part in ("128", "dialogue", "stress"):
        for policy, first_s in (("off", 0.4), ("cost", 0.1)):
            timings[part, policy] = (timing(first_s, first_s + 0.2), timing(first_s, first_s + 0.2))
    found = pipelining.PipeliningResult(timings, {"stress": "32 requests"}, ([], []), [])
    tables = pipelining.tables_of(found)
    text = printed(tables[0])
    assert all(word in text for word in ("128", "400", "100", "-75 %"))
    assert "+100 %" in printed(tables[2])  # tokens/s: the same tokens in half of the time
    assert pipelining.is_right(found)
    pipelining.show(found, tmp_path / "found.json", tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    means = pipelining.panels_of(found)[0]
    assert means.lines["off"] == [(128.0, pytest.approx(400.0))]


def test_rounds_are_laid_end_to_end():
    first = (timing(1.0, 3.0), timing(2.0, 4.0))
    moved = pipelining.rebased(first, (timing(101.0, 102.0, intended_s=100.0),))
    assert moved[0].intended_s == pytest.approx(4.0)
    assert moved[0].ttft_s == pytest.approx(1.0)
    assert moved[0].stamps_s == pytest.approx((5.0, 6.0))
    assert pipelining.rebased((), first) == first


# Interference.


def streams(stall_s: float) -> tuple[RequestTiming, ...]:
    """A token every 0.1 s, from 0 to 20 s, but for a stall at 10 s."""
    stamps = [0.1 * number for number in range(101)] + [
        10.0 + stall_s + 0.1 * number for number in range(100)
    ]
    return (timing(*stamps),)


def beside(stall_s: float) -> interference.Round:
    return interference.Round(streams(stall_s), (timing(12.0, intended_s=9.5),), CALM)


def test_gaps_count_while_long_prompts_are_there():
    calm = interference.gaps_between(streams(1.0), 0.0, 5.0)
    assert max(calm) == pytest.approx(0.1)
    each = beside(1.0)
    assert each.window_s == (9.5, 12.0)
    assert max(each.gaps_s) == pytest.approx(1.0)
    # Over the whole answer the stall is one gap of 200, and p99 would not see it.
    assert len(each.gaps_s) < 20


NAMES = (
    interference.COMBINED,
    interference.CHUNKED,
    interference.PAIR,
    interference.SHIPPED,
)


def found_with(stalls: dict[str, float], firsts: dict[str, float]) -> interference.InterferenceResult:
    """Prompts of two lengths; the longer ones take ten times as long, and half as long again but combined."""
    alone = {}
    for name, first_s in firsts.items():
        longer_s = 10.0 if name == interference.COMBINED else 15.0
        alone[name, 64] = [timing(first_s), timing(first_s), timing(9.0)]
        alone[name, 512] = [timing(longer_s)]
    rounds = {name: [beside(stall_s)] * 2 for name, stall_s in stalls.items()}
    return interference.InterferenceResult(alone, rounds, {}, ([], []))


def test_interference_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    stalls = dict(zip(NAMES, (1.0, 0.3, 0.2, 0.2), strict=True))
    found = found_with(stalls, dict(zip(NAMES, (1.0, 1.1, 1.2, 1.2), strict=True)))
    pair = interference.PAIR
    assert found.ttft_ratio(pair, 64) == pytest.approx(1.2)
    assert found.ttft_ratio_worst(pair) == pytest.approx(1.5)  # a length that misses is a target that misses
    assert found.itl_ratio(pair) == pytest.approx(0.2, rel=0.1)
    assert found.itl_ratio(interference.COMBINED) == 1.0
    first, gaps = (printed(table) for table in interference.tables_of(found))
    assert "1200.0 (1.20)" in first
    assert "15000.0 (1.50)" in first
    assert "1000.0" in gaps
    assert interference.is_right(found)
    interference.show(found, tmp_path / "found.json", tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert f"{pair}: ttft 1.50 of combined (at most 1.25: MISSED)" in told
    assert f"{pair}: itl p99 0.20 of combined (at most 0.5: met)" in told
    figures = json.loads((tmp_path / "found.json").read_text())["results"]["figures"]
    assert figures[pair]["itl_s"]["num"] == 2 * len(beside(0.2).gaps_s)
    assert figures[pair]["ttft_ratio"]["512"] == pytest.approx(1.5)


def test_answers_that_are_too_short_are_no_measurement():
    short = interference.Round((timing(0.1, 0.2),), (timing(12.0, intended_s=9.5),), CALM)
    found = interference.InterferenceResult({}, {interference.PAIR: [short]}, {}, ([], []))
    with pytest.raises(EngineError, match="answers are too short"):
        found.gaps(interference.PAIR)


def test_what_is_compared_has_default_options():
    shapes = interference.shapes("demo", "")
    compared = [shapes[name] for name in (interference.COMBINED, interference.PAIR)]
    assert [shape.instance_options + shape.prefill_options for shape in compared] == [(), ()]
    told = interference.described(shapes)
    assert set(told) == set(NAMES)
    assert "default options" in told[interference.COMBINED]
    assert "--chunk-tokens 64" in told[interference.CHUNKED]


def test_processes_of_a_benchmark_share_a_private_secret_and_end_with_it() -> None:
    with BenchProcesses() as processes:
        child = processes.start("one", [sys.executable, "-c", "import time; time.sleep(600)"])
        assert child.name == "one-0"
        assert processes.secret_file.stat().st_mode & 0o077 == 0
        folder = processes.folder
    assert not child.is_running
    assert not folder.exists()
