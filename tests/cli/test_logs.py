"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from baton.cli import logs
from baton.cli.deployment import is_log


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As they were, afterwards."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    handlers, levels = root.handlers[:], (root.level, baton.level)
    root.handlers = []  # pytest's own would be closed
    yield
    root.handlers = handlers
    root.setLevel(levels[0])
    baton.setLevel(levels[1])


def test_json_lines_carry_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("info", "json")
    log = logging.getLogger("baton.test")
    log.info("hand-over %s done", "7", extra={"fields": {"transfer": "7", "bytes": 12}})
    log.debug("not shown")
    try:
        raise RuntimeError("a bug\nin two lines")
    except RuntimeError:
        log.exception("failed")
    first, second = capsys.readouterr().err.splitlines()
    line = json.loads(first)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "info",
        "logger": "baton.test",
        "message": "hand-over 7 done",
        "transfer": "7",
        "bytes": 12,
    }
    assert "RuntimeError: a bug\nin two lines" in json.loads(second)["trace"]
    assert is_log(first)
    assert json.loads(logs.with_service(first, "prefill-0"))["service"] == "prefill-0"


@pytest.mark.parametrize(("level", "shown"), [("debug", "DIWE"), ("info", "IWE"), ("error", "E")])
def test_the_level_is_that_of_baton_alone(
    capsys: pytest.CaptureFixture[str], level: logs.Level, shown: str
) -> None:
    logs.set_up_logs(level, "text")
    log = logging.getLogger("baton.test")
    for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(severity, "a line")
    logging.getLogger("another.library").info("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2][0] for line in lines] == [*shown]
    assert all(is_log(line) for line in lines)


def test_lines_from_elsewhere_become_records() -> None:
    raw = io.StringIO()
    stream = logs.JsonStream(raw)
    record = '{"time": "now", "level": "info", "logger": "baton", "message": "as it is"}'
    stream.write(f"{record}\n{logs.with_service(record, 'prefill-0')}\nbaton: no ")
    stream.write("such file\n\n 3%\rloaded 9%\nUserWarning: odd")
    stream.close()
    first, second, *others = map(json.loads, raw.getvalue().splitlines())
    assert (first, second) == (json.loads(record), {"service": "prefill-0", **first})
    assert [(each["level"], each["logger"], each["message"]) for each in others] == [
        ("error", "baton", "no such file"),
        ("warning", "stderr", "loaded 9%"),
        ("warning", "stderr", "UserWarning: odd"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "up --model demo --log-format json --frob",
        "serve --model nowhere --log-format=json",
        "route --log-format json",
        "registry --log-format json --secret-file nowhere",
    ],
)
def test_misuse_is_told_in_json_too(line: str) -> None:
    command = [sys.executable, "-m", "baton", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    (record,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, record["level"], record["logger"]) == (2, "error", "baton")
    assert not record["message"].startswith("baton: ")


def test_a_traceback_is_one_record() -> None:
    program = "from baton.cli import logs; logs.write_only_json(); import threading\n"
    program += "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); [][1]"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    thread, main = map(json.loads, done.stderr.splitlines())
    assert (thread["level"], thread["message"]) == ("critical", "ZeroDivisionError: division by zero")
    assert main["message"] == "IndexError: list index out of range"
    assert "line 2" in main["trace"]


def test_only_the_own_options_of_a_command_count() -> None:
    assert not logs.asks_for_json(["up", "--", "--log-format", "json"])
    assert not logs.asks_for_json(["up", "--log-format", "text"])
