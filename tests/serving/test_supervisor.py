"""An instance that dies is started anew; one that cannot live is given up; signals end a server."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from tests.serve.deployment import secret_file, serve_part
from tests.serve.parts import START_S_MAX
from tests.serve.speaking import oracle_text
from tests.serving.live import Live, live, until
from tests.serving.streams import half_read, heard

from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.serving import supervisor as supervising
from baton.serving.http import EventSplitter
from baton.serving.supervisor import InstanceSupervisor

pytestmark = pytest.mark.serve

FOX = "the quick brown fox"
LONG = {"prompt": FOX, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def recovers(served: Live, address: str, num_starts: int) -> None:
    """It is there again, in the same place, and answers as before."""
    supervisor = served.server.supervisor
    until(lambda: supervisor.num_starts > num_starts and supervisor.is_ready, "another instance runs")
    assert served.instance.address == address
    assert served.ask("/health").status == 200
    answer = served.ask("/v1/completions", {**LONG, "max_tokens": 8})
    assert answer.json["choices"][0]["text"] == oracle_text(FOX, 8, ignore_eos=True).text


def test_a_rank_that_dies_ends_streams_cleanly_and_comes_back():
    with live(layout="tp2") as served:
        address, epoch = served.instance.address, served.instance.epoch
        body = {**LONG, "stream": True, "baton": {"tokens": True}}
        with half_read(served, "/v1/completions", body) as connection:
            data = connection.recv(1 << 16)
            assert data.startswith(b"HTTP/1.1 200")
            os.kill(served.instance.pids[1], signal.SIGKILL)
            while not data.endswith(b"0\r\n\r\n"):
                more = connection.recv(1 << 16)
                assert more, "the stream was cut off without a word"
                data += more
        until(lambda: not served.server.supervisor.is_ready, "its end was noticed")
        refused = served.ask("/v1/completions", LONG)
        assert (refused.status, refused.json["error"]["code"]) == (503, "LOADING")
        assert int(refused.headers["Retry-After"]) >= 1
        assert served.ask("/health").status == 503
        lines = data.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]  # without the sizes of chunks
        stream = heard(list(EventSplitter().feed(b"".join(lines))))
        assert not stream.is_done
        assert stream.error["code"] == "PEER_LOST"
        assert (
            stream.choices[0].tokens
            == list(oracle_text(FOX, 400, ignore_eos=True).tokens)[: len(stream.choices[0].tokens)]
        )
        recovers(served, address, 1)
        assert served.instance.epoch > epoch
        assert served.metric("baton_instance_starts") == 2


def test_what_cannot_be_is_given_up_at_once(tmp_path: Path):
    supervisor = InstanceSupervisor(EngineConfig(str(tmp_path)), lambda: None)
    supervisor.start()
    until(lambda: supervisor.failure, "it is given up")
    assert isinstance(supervisor.failure, ConfigError)
    supervisor.close(60)


def test_what_ends_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervising, "FAILURES_MAX", 2)
    monkeypatch.setattr(supervising, "FAILURES_S", 1e6)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match="ended 2 times"), live(port=taken.getsockname()[1]):
            pass


def test_a_server_drains_and_ends_with_0(tmp_path: Path):
    secret_file(tmp_path)
    part = serve_part(tmp_path, "alone", "both", "tp1")
    with part:
        assert until(part.said, "it says where it is before its weights are loaded")
        part.wait()
        assert part.output.splitlines()[0] == f"serving at {part.url}"
        part.send(signal.SIGTERM)
        assert part.process is not None
        assert part.process.wait(START_S_MAX) == 0
    assert all(not Path(f"/proc/{pid}").exists() for pid in part.rank_pids)


def test_misuse_is_one_line_and_2(tmp_path: Path):
    secret_file(tmp_path)
    part = serve_part(tmp_path, "alone", "prefill", "tp1", host="0.0.0.0")
    part.start()
    assert part.process is not None
    assert part.process.wait(START_S_MAX) == 2
    assert part.output.startswith("baton: host '0.0.0.0'")


def test_a_wrong_layout_ends_the_server(tmp_path: Path):
    secret_file(tmp_path)
    part = serve_part(tmp_path, "alone", "both", "pp9")
    part.start()
    assert part.process is not None
    assert part.process.wait(START_S_MAX) == 2
    assert "pp9" in part.output or "stages" in part.output
