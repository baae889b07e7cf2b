"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
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
