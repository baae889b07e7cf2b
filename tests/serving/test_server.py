"""Clients that leave, do not read, send nonsense or too much; and what is told of it all."""

from __future__ import annotations

import json
import random
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engine.e2e.instances import stopped
from tests.serve.speaking import oracle_text
from tests.serving.live import Live, live, until
from tests.serving.streams import half_read
from tests.test_docs import PAGES, shell_commands

from baton.cli.options import InstanceOptions
from baton.cli.parser import engine_fields, parse
from baton.serving import server as serving
from baton.serving.openai import ChatRequest, CompletionRequest, GenerateRequest

pytestmark = pytest.mark.serve

FOX = "the quick brown fox"
LONG = {"prompt": FOX, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_everything(served: Live, is_stream: bool):
    until(served.is_idle, "nothing else runs")
    with half_read(served, "/v1/completions", {**LONG, "n": 3, "stream": is_stream}) as connection:
        if is_stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            until(lambda: served.instance.load().num_running, "it is computed")
        num_generated = served.metric("baton_inter_token_latency_seconds_count")
    until(served.is_idle, "every page is back")
    # It was not computed to its end: that would have been 1200 tokens.
    assert served.metric("baton_inter_token_latency_seconds_count") - num_generated < 900


def test_a_client_that_does_not_read_is_dropped(served: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "WRITE_S_MAX", 0.3)
    until(served.is_idle, "nothing else runs")
    body = {**LONG, "n": 12, "stream": True, "logprobs": 100}
    with half_read(served, "/v1/completions", body) as connection:
        until(lambda: served.instance.load().num_running, "it is computed")
        until(served.is_idle, "it is given up though nobody closed the connection")
        connection.settimeout(60)
        received = 0
        try:
            while data := connection.recv(1 << 20):
                received += len(data)
        except ConnectionError:
            pass
    assert received < 12 * 400 * 3000, "it was not read to its end"


@pytest.mark.parametrize("seed", [66, 67, 68])
def test_nonsense_never_becomes_a_failure_of_the_server(served: Live, seed: int):
    chance = random.Random(seed)
    good = {
        "/v1/completions": {"prompt": FOX, "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/generate": {"text": FOX, "sampling_params": {"max_new_tokens": 2}},
    }
    values = [
        None,
        True,
        0,
        -1,
        1,
        2**64,
        1e308,
        0.5,
        "",
        "x",
        [],
        [1],
        ["a"],
        [[1]],
        {},
        {"a": 1},
        [None],
        [{}],
    ]
    names = [
        *(
            "prompt",
            "messages",
            "text",
            "input_ids",
            "n",
            "logprobs",
            "top_logprobs",
            "stop",
            "seed",
            "stream",
        ),
        *(
            "logit_bias",
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "echo",
            "tools",
        ),
        *("stop_token_ids", "bootstrap_room", "baton", "chat_template_kwargs", "model", "sampling_params"),
    ]
    kinds = dict(zip(PATHS, (CompletionRequest, ChatRequest, GenerateRequest), strict=True))
    statuses = []
    for _ in range(250):
        path = chance.choice(PATHS)
        own = [name for name in names if name in kinds[path].__struct_fields__]
        own = own if chance.random() < 0.9 else names
        body = {
            **good[path],
            **{chance.choice(own): chance.choice(values) for _ in range(chance.randrange(3))},
        }
        raw = json.dumps(body).encode()
        if chance.random() < 0.2:
            raw = raw[: chance.randrange(len(raw))]
        answer = served.ask(path, raw)
        statuses.append(answer.status)
        assert answer.status < 500, (path, raw, answer.text)
        if answer.status >= 400:
            assert answer.json["error"]["message"]
    assert statuses.count(200) > 20
    until(served.is_idle, "nothing is left of it")


def test_what_is_told_of_requests(served: Live):
    until(served.is_idle, "nothing else runs")
    before = served.metric("baton_generation_tokens_total")
    expected = oracle_text(FOX, 5, ignore_eos=True)
    body = {"prompt": FOX, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = served.ask("/v1/completions", body)
    assert answer.json["choices"][0]["text"] == expected.text
    assert served.metric("baton_generation_tokens_total") == before + 5
    assert served.metric('baton_requests_total{endpoint="/v1/completions",status="200"}') > 0
    assert served.metric('baton_pages{state="free"}') > 0
    name = answer.json["id"]
    assert answer.headers["X-Request-Id"] == name
    given = {**body, "baton": {"id": "cmpl-of-the-router"}}
    refused = served.ask("/v1/completions", {**given, "max_tokens": 1 << 20})
    assert (refused.status, refused.headers["X-Request-Id"]) == (400, "cmpl-of-the-router")
    unread = served.ask("/v1/completions", {**given, "max_tokens": "many"})
    assert "expected int, got str" in unread.json["error"]["message"]
    assert unread.headers["X-Request-Id"] == "cmpl-of-the-router"
    found = served.ask(f"/v1/timelines/{name}").json
    assert found["jobs"][0]["side"] == "alone"
    figures = found["jobs"][0]["figures"]
    assert 0 <= figures["queue_s"] <= figures["ttft_s"] <= figures["total_s"]
    assert FOX not in json.dumps(found)
    trace = served.ask(f"/v1/timelines/{name}?format=perfetto").json
    assert {"queue", "prefill", "decode"} <= {event["name"] for event in trace["traceEvents"]}
    assert served.ask("/v1/timelines").json["data"][0]["id"] == name
    assert served.ask("/v1/timelines/nobody").status == 404
    assert served.ask(f"/v1/timelines/{name}?format=x").status == 400


def test_the_curl_commands_of_the_pages_run(served: Live, tmp_path: Path):
    """With this server's URL and the id of a request; those of the registry's page are run in its tests."""
    name = served.ask("/v1/completions", {"prompt": FOX, "max_tokens": 2}).json["id"]
    (tmp_path / "api-keys").write_text("key\n")
    pages = [page for page in PAGES if page.name != "registry.md"]
    found = {command for page in pages for command in shell_commands(page.read_text())}
    commands = sorted(command for command in found if command.startswith("curl "))
    assert len(commands) >= 4
    for command in commands:
        here = re.sub(r"(http://)?(localhost|[\d.]+):8000", served.url, command)
        words = ["bash", "-c", re.sub(r"cmpl-\w+", name, here).replace("curl ", "curl --fail -sS ", 1)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr) == (0, ""), command
        written = tmp_path / "trace.json"
        assert json.loads(written.read_text() if ">" in command else done.stdout), command


def test_reports_for_routers(served: Live):
    for path in ("/server_info", "/get_server_info"):
        told = served.ask(path).json
        assert told["coordinator"] == served.instance.address
        assert (told["role"], told["layout"], told["is_ready"], told["is_draining"]) == (
            "both",
            "tp1",
            True,
            False,
        )
        assert told["pages"]["total"] == sum(
            told["pages"][state] for state in ("free", "used", "leased", "quarantined")
        )
        assert {"num_running", "num_waiting", "num_tokens", "num_queue_max"} <= set(told["load"])
        assert {"prefill_tokens_per_s", "decode_tokens_per_s", "handoff_s"} <= set(told["rates"])
    for path in ("/model_info", "/get_model_info"):
        assert served.ask(path).json["is_generation"] is True
    for path in ("/health", "/health_generate"):
        assert served.ask(path).status == 200


def test_without_a_prefix_cache_every_prompt_is_computed_whole():
    body = {"prompt": list(range(1, 100)), "max_tokens": 2, "temperature": 0}
    texts = []
    for words, is_cached in (((), True), (("--no-prefix-caching",), False)):
        options = parse(InstanceOptions, ("--model", "m", *words))
        with live(has_prefix_cache=engine_fields(options)["has_prefix_cache"]) as own:
            answers = [own.ask("/v1/completions", body).json for _ in range(2)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert (cached[1] > 0) is is_cached
        texts += [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts)) == 1


def test_what_waits_for_longer_than_the_queue_timeout_is_refused():
    with live(queue_s_max=1e-9) as served:
        answer = served.ask("/v1/completions", LONG)
        assert (answer.status, answer.json["error"]["code"]) == (503, "QUEUE_TIMEOUT")
        assert "(--queue-timeout)" in answer.json["error"]["message"]
        until(served.is_idle, "nothing is left of it")


def test_a_full_queue_says_so_and_drains():
    with live(queue_max=2, sequences_max=1) as served:
        body = {**LONG, "max_tokens": 200, "stream": True}
        with stopped(served.instance), ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(half_read(served, "/v1/completions", body))
            until(lambda: served.instance.load().num_waiting == 2, "two wait")
            answer = served.ask("/v1/completions", body)
            assert (answer.status, answer.json["error"]["code"]) == (429, "QUEUE_FULL")
            assert int(answer.headers["Retry-After"]) >= 1
        until(served.is_idle, "those that left are over")
        with ExitStack() as stack:
            with stopped(served.instance):
                connection = stack.enter_context(
                    half_read(served, "/v1/completions", {**body, "max_tokens": 60})
                )
                until(lambda: served.server.open, "it was taken in")
                told = served.ask("/drain", {}).json
                assert (told["is_draining"], told["num_open"]) == (True, 1)
                refused = served.ask("/v1/completions", body)
                assert (refused.status, refused.json["error"]["code"]) == (503, "DRAINING")
                assert served.ask("/health").status == 503
                assert served.ask("/server_info").json["is_draining"] is True
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                more = connection.recv(1 << 16)
                assert more, "the stream was cut off without a word"
                data += more
            assert data.startswith(b"HTTP/1.1 200 OK")
            assert b"data: [DONE]" in data
