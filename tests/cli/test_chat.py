"""`baton chat` as a person and as a script meet it."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.endpoint import Endpoint, endpoint
from tests.ports import free_port

from baton.cli import main

LIMIT_S = 120.0


@pytest.fixture
def served() -> Iterator[Endpoint]:
    with endpoint() as found:
        yield found


@pytest.fixture
def piped(monkeypatch, capsys):
    def run(url: str, questions: str, *words: str, key: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "chat", "--url", url, *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        if key:
            monkeypatch.setenv("BATON_API_KEY", key)
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def test_a_question_a_line_and_each_knows_the_ones_before(piped, served) -> None:
    words = ["--system", "be brief", "--temperature", "0", "--max-tokens", "7"]
    code, out, err = piped(served.url + "/v1", "one two\n\nthree\n", *words, key="the-key-of-a-client")
    assert (code, out, err) == (0, "one! two! \nthree! \n", "")
    first, second = served.asked
    assert first == {
        "model": "first",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two"}],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": 7,
    }
    assert [message["content"] for message in second["messages"]] == [
        "be brief",
        "one two",
        "one! two! ",
        "three",
    ]
    assert served.keys == ["Bearer the-key-of-a-client"] * 2


def test_the_key_comes_from_a_private_file(piped, served, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text("first-key-of-the-file\nanother-key\n")
    assert piped(served.url, "hi\n", "--model", "second", "--api-key-file", str(file))[0] == 0
    assert served.keys == ["Bearer first-key-of-the-file"]
    assert served.asked[0]["model"] == "second"
    assert "temperature" not in served.asked[0], "what nobody set is the endpoint's to choose"
    file.chmod(0o644)
    code, out, err = piped(served.url, "hi\n", "--api-key-file", str(file))
    assert (code, out) == (2, "")
    assert "chmod 600" in err


def test_nothing_listens(piped) -> None:
    port = free_port()
    code, out, err = piped(f"http://127.0.0.1:{port}", "hi\n")
    assert (code, out) == (1, "")
    assert err == (
        f"baton: nothing listens at http://127.0.0.1:{port}; start a deployment with baton up, "
        "or name another --url\n"
    )


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:port"])
def test_an_address_that_is_none_is_misuse(piped, url: str) -> None:
    code, out, err = piped(url, "hi\n")
    assert (code, out) == (2, "")
    assert "http://127.0.0.1:8000" in err
    assert err.count("\n") == 1


def test_a_refusal_is_told_in_its_own_words(piped, served) -> None:
    served.status, served.refusal = 401, b'{"error": {"message": "the key is missing", "type": "x"}}'
    code, out, err = piped(served.url, "hi\n", "--model", "first")
    assert (code, out) == (1, "")
    assert err == f"baton: {served.url} answers 401: the key is missing\n"


def test_something_that_is_no_endpoint(piped, served) -> None:
    served.refusal = b"<html>hello</html>"
    code, out, err = piped(served.url, "hi\n")
    assert (code, out) == (1, "")
    assert "is this an OpenAI endpoint?" in err


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (b'data: {"error": {"message": "PEER_LOST: decode-0 is gone"}}\n\n', "PEER_LOST: decode-0 is gone"),
        (b"", "broke off before the end"),
    ],
)
def test_half_an_answer_is_a_failure(piped, served, tail: bytes, said: str) -> None:
    served.tail = tail
    code, out, err = piped(served.url, "one two\nthree\n")
    assert code == 1
    assert out == "one! two! "
    assert said in err.splitlines()[-1]


class Terminal:
    """`baton chat` with a keyboard and a screen."""

    def __init__(self, url: str) -> None:
        self.screen = ""
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "baton", "chat", "--url", url])

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def until(self, text: str) -> None:
        """Waits for something new on the screen, and forgets what came before it."""
        limit_s = time.monotonic() + LIMIT_S
        while text not in self.screen:
            assert time.monotonic() < limit_s, f"{text!r} is not in {self.screen!r}"
            ready, _, _ = select.select([self.handle], [], [], 1.0)
            try:
                self.screen += os.read(self.handle, 4096).decode() if ready else ""
            except OSError:  # the other side of the terminal has ended
                assert text in self.screen, self.screen
        self.screen = self.screen.partition(text)[2]

    def ended(self) -> int:
        limit_s = time.monotonic() + LIMIT_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < limit_s, "it goes on"
            time.sleep(0.05)

    def close(self) -> None:
        os.close(self.handle)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def terminal(served) -> Iterator[Terminal]:
    found = Terminal(served.url)
    yield found
    found.close()


def test_a_conversation_at_a_terminal(served, terminal) -> None:
    terminal.until("first at http://127.0.0.1")
    terminal.until("> ")
    served.is_endless = True
    terminal.type("tell me\n")
    terminal.until("tell! me! on on")
    terminal.type("\x03")
    terminal.until("[stopped]")
    assert served.left.wait(LIMIT_S), "the endpoint was not told"
    served.is_endless = False
    terminal.until("> ")
    terminal.type("\x03")  # with nothing under way it is only a new line
    terminal.until("> ")
    terminal.type("go ahead\n")
    terminal.until("go! ahead! ")
    terminal.until("> ")
    said = [message["content"] for message in served.asked[1]["messages"]]
    assert said[0] == "tell me"
    assert said[1].startswith("tell! me! on on")
    served.status, served.refusal = 503, b'{"error": {"message": "no instance is ready"}}'
    terminal.type("still there\n")
    terminal.until("answers 503: no instance is ready")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.ended() == 0
