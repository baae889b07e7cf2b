"""`baton up` with real processes: it serves, mends itself, and leaves nothing behind, however it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from tests.faults.stages import is_alive, named_segments
from tests.serve.parts import ask, children, until
from tests.serve.speaking import chat_ids, model, oracle_text

pytestmark = pytest.mark.serve

LIMIT_S = 300.0
PROMPT, NUM_TOKENS = "the quick fox", 12


class Up:
    """`baton up` as somebody at a shell runs it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.files = [folder / name for name in ("stdout", "stderr")]
        (folder / "temporary").mkdir()
        environment = {**os.environ, "TMPDIR": str(folder / "temporary"), "OMP_NUM_THREADS": "1"}
        for name in ("BATON_SECRET", "BATON_API_KEY"):
            environment.pop(name, None)
        command = [
            sys.executable,
            "-m",
            "baton",
            "up",
            "--model",
            str(model()),
            "--pool-tokens",
            "4096",
            *words,
        ]
        with self.files[0].open("wb") as out, self.files[1].open("wb") as err:
            # Under nohup SIGHUP is ignored, here and in what is started.
            begin = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=environment,
                preexec_fn=begin,  # noqa: PLW1509 - no lock taken
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(LIMIT_S)

    @property
    def out(self) -> str:
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        return self.files[1].read_text()

    def url(self) -> str:
        """Where it serves, once it does."""
        until(lambda: "curl" in self.out or self.process.poll() is not None, "it serves", LIMIT_S)
        assert self.process.poll() is None, self.err
        return re.match(r"serving \S+ at (http://127\.0\.0\.1:\d+)\n", self.out)[1]

    def parts(self) -> dict[str, int]:
        """Pids by name: of the registry, the instances and the router."""
        found = {}
        for pid in self.everyone():
            words = _read(pid, "cmdline")
            if instance := re.match(r"baton ((prefill|decode|both)-\d+)\n", "".join(_read(pid, "comm"))):
                found[instance[1]] = pid
            elif words[1:3] == ["-m", "baton"] and words[3] != "up":
                found[words[3]] = pid
        return found

    def everyone(self) -> set[int]:
        """Pids of all that it started, ranks too."""
        found, new = set(), {self.process.pid}
        while new:
            new = {child for pid in new for child in children(pid)}
            found |= new
        return found

    def ended(self) -> int:
        return self.process.wait(LIMIT_S)

    def leftovers(self) -> list[str]:
        return [str(path) for path in (self.folder / "temporary").iterdir()]


def _read(pid: int, what: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Up]]:
    """For tests to put what they start into, so that it ends with them."""
    found: list[Up] = []
    yield found
    for each in found:
        each.__exit__()
        print(each.err, file=sys.stderr)


def answer(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    reply = ask(url, "/v1/completions", body)
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["text"]


def again(up: Up, name: str) -> int:
    """Kills a part and waits until another process has taken its place."""
    former = up.parts()[name]
    os.kill(former, signal.SIGKILL)
    until(lambda: up.parts().get(name, former) != former, f"{name} is started again", LIMIT_S)
    return up.parts()[name]


def test_it_serves_mends_itself_and_ends_in_order(tmp_path, started) -> None:
    up = Up(tmp_path, "--prefill", "pp2", "--decode", "tp2", "--port", "0")
    started.append(up)
    url, expected = up.url(), oracle_text(PROMPT, NUM_TOKENS)
    assert expected.is_certain
    assert answer(url) == expected.text
    parts = up.parts()
    assert set(parts) == {"registry", "prefill-0", "decode-0", "route"}
    assert "prefill-0 (pp2) to decode-0 (tp2): " in up.out
    assert "loading weights" in up.err

    (secret,) = {
        word.removeprefix("BATON_SECRET=")
        for pid in parts.values()
        for word in _read(pid, "environ")
        if word.startswith("BATON_SECRET=")
    }
    shown = [word for pid in up.everyone() for word in _read(pid, "cmdline")]
    assert not [word for word in shown if secret in word], "whoever lists processes reads the secret"
    assert secret not in up.out + up.err

    curl = re.search(r"curl -N (\S+) .* -d '(.*)'$", up.out, re.MULTILINE)
    reply = ask(curl[1].removesuffix("/v1/chat/completions"), "/v1/chat/completions", json.loads(curl[2]))
    assert reply.status == 200
    assert reply.body.endswith(b"data: [DONE]\n\n")

    spoken = oracle_text(chat_ids([{"role": "user", "content": PROMPT}]), NUM_TOKENS)
    words = [sys.executable, "-m", "baton", "chat", "--url", url, "--temperature", "0"]
    words += ["--max-tokens", str(NUM_TOKENS)]
    chat = subprocess.run(words, input=PROMPT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout == f"{spoken.text}\n"

    for name in ("registry", "route", "prefill-0"):
        again(up, name)
        until(lambda: _is_answered(url, expected.text), f"it answers again after {name}", LIMIT_S)
        assert f"{name.replace('route', 'router')}: was ended by signal 9" in up.err
    until(lambda: len(up.everyone()) >= 4 + 3 + 4 + 1, "parts, fork servers, ranks and a guard", LIMIT_S)
    everyone = up.everyone()
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0, up.err
    assert not {pid for pid in everyone if is_alive(pid)}
    assert up.leftovers() == []


UNLIKE = "--page-tokens 64 --kv-layout hnd.apart"


def test_instances_that_store_their_kv_cache_differently(tmp_path, started) -> None:
    """In fp32 as the oracle says; where decode stores bf16, as an instance with a bf16 cache does alone."""
    texts = []
    runs = {
        "order": ("--prefill", "tp2", "--decode", "tp1", "--decode-args", UNLIKE),
        "dtype": ("--prefill", "tp1", "--decode", "tp1", "--decode-args", f"{UNLIKE} --kv-cache-dtype bf16"),
        "alone": ("--prefill", "tp1", "--prefill-args", "--kv-cache-dtype bf16"),
    }
    for name, words in runs.items():
        (tmp_path / name).mkdir()
        with Up(tmp_path / name, "--port", "0", "--verify", *words) as up:
            started.append(up)
            texts.append(answer(up.url()))
            assert ("converted from fp32 to bf16" in up.out) == (name == "dtype")
    assert texts[0] == oracle_text(PROMPT, NUM_TOKENS).text
    assert texts[1] == texts[2]


def test_with_json_logs_all_of_stderr_is_json(tmp_path, started) -> None:
    """From the plan to the end, with a restart and a failure for good."""
    up = Up(tmp_path, "--prefill", "tp1", "--decode", "tp1", "--port", "0", "--log-format", "json")
    started.append(up)
    url, expected = up.url(), oracle_text(PROMPT, NUM_TOKENS)
    assert answer(url) == expected.text
    again(up, "prefill-0")
    until(lambda: _is_answered(url, expected.text), "it answers again", LIMIT_S)
    for _ in range(3):
        again(up, "registry")
    os.kill(up.parts()["registry"], signal.SIGKILL)
    assert up.ended() == 1
    records = [json.loads(line) for line in up.err.splitlines()]
    assert [each for each in records if not {"time", "level", "message"} <= each.keys()] == []
    messages = [(each["level"], each.get("service"), each["message"]) for each in records]
    assert ("info", "prefill-0", "prefill-0 (tp1): starting") in messages
    restart = "prefill-0: was ended by signal 9; restarting it (1 of at most 3 restarts a minute)"
    assert ("warning", "prefill-0", restart) in messages
    assert any(each.get("event") == "request" and each["service"] == "router" for each in records)
    assert records[-1]["level"] == "error"
    assert records[-1]["message"].startswith("registry ended 4 times within 60 s")


def _is_answered(url: str, text: str) -> bool:
    try:
        return answer(url) == text
    except (OSError, AssertionError):
        return False


def test_a_part_that_dies_for_good_ends_all_with_the_cause(tmp_path, started) -> None:
    up = Up(tmp_path, "--prefill", "tp1", "--port", "0")
    started.append(up)
    assert answer(up.url()) == oracle_text(PROMPT, NUM_TOKENS).text
    assert "both-0 (tp1) prefills and decodes by itself" in up.out
    for _ in range(3):
        again(up, "registry")
    everyone = up.everyone()
    os.kill(up.parts()["registry"], signal.SIGKILL)
    assert up.ended() == 1
    last = up.err.splitlines()[-1]
    assert last.startswith(
        "baton: registry ended 4 times within 60 s; the last time it was ended by signal 9"
    )
    assert not {pid for pid in everyone if is_alive(pid)}
    assert up.leftovers() == []


ENDS = {
    "killed": signal.SIGKILL,
    "killed while it starts": signal.SIGKILL,
    "terminated after a rank was killed": signal.SIGTERM,
    "hung up": signal.SIGHUP,
    "interrupted twice": signal.SIGINT,
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_outlives_it(tmp_path, started, how: str) -> None:
    up = Up(tmp_path, "--prefill", "tp1", "--decode", "tp1", "--port", "0")
    started.append(up)
    if "starts" in how:
        until(lambda: len(up.everyone()) >= 5, "the parts are started", LIMIT_S)
    else:
        answer(up.url())  # with memory for a hand-over
    everyone = up.everyone()
    # Whoever kills all of them at once leaves nothing either.
    assert not {name for pid in everyone for name in named_segments(pid)}
    assert up.leftovers() == []
    if "rank" in how:
        instances = [pid for name, pid in up.parts().items() if name.endswith("-0")]
        rank = max(pid for pid in everyone if not children(pid) and pid > max(instances))
        os.kill(rank, signal.SIGKILL)
        until(lambda: not is_alive(rank), "the rank has ended", LIMIT_S)
        everyone |= up.everyone()
    with running_request(up) if "twice" in how else nullcontext() as stream:
        up.process.send_signal(ENDS[how])
        if stream is not None:
            until(lambda: "finishing running requests" in up.err, "it drains", LIMIT_S)
            up.process.send_signal(ENDS[how])
        assert up.ended() == (-ENDS[how] if ENDS[how] in (signal.SIGKILL, signal.SIGHUP) else 0)
        assert stream is None or b"[DONE]" not in rest(stream), "it waited for the request"
    until(lambda: not {pid for pid in everyone if is_alive(pid)}, "all have ended", LIMIT_S)
    assert up.leftovers() == []


@contextmanager
def running_request(up: Up) -> Iterator[http.client.HTTPResponse]:
    """A stream of more tokens than anybody waits for; it has begun."""
    body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection(up.url().removeprefix("http://"), timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


def rest(response: http.client.HTTPResponse) -> bytes:
    """What is left of it, also where it was cut."""
    try:
        return response.read()
    except http.client.IncompleteRead as cut:
        return cut.partial
    except OSError:
        return b""


def test_an_instance_that_cannot_start_is_told_at_once(tmp_path, started) -> None:
    # A KV cache of terabytes, where its processes may have a quarter of one each.
    sizes = ("--pool-tokens", "1000000000000", "--page-tokens", "1000000")
    up = Up(tmp_path, "--prefill", "tp1", "--decode", "tp1", "--port", "0", *sizes)
    resource.prlimit(up.process.pid, resource.RLIMIT_AS, (2**38, 2**38))
    started.append(up)
    assert up.ended() == 1
    last = up.err.splitlines()[-1]
    assert re.match(r"baton: (prefill|decode)-0 cannot start: rank 0 .* Cannot allocate memory", last)
    assert up.out == ""
    assert up.leftovers() == []
