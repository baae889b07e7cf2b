"""Logs of the commands that run servers: lines for people on stderr, or one JSON object each.

With `--log-format json` all of stderr is JSON, from the first line to the last: what does not come from a
logger (messages of the command, tracebacks, warnings and progress of libraries) becomes records too.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, TextIO, TypeAlias

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Form: TypeAlias = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JSON_START = '{"time": '
_SERVICE_START = '{"service": '
_COMMAND = "baton: "
"""Before what a command says about its failure."""


class JsonFormatter(logging.Formatter):
    """Time (UTC), level, logger and message; then what the caller gave as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps({**line, **getattr(record, "fields", {})}, default=str)


class JsonStream(io.TextIOBase):
    """A text stream that writes every line as a log record, unless it is one already."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._write_line(line)
        return len(text)

    def _write_line(self, line: str) -> None:
        shown = line.rpartition("\r")[2].rstrip()  # progress overwrites itself
        if shown.startswith(_COMMAND):
            shown = _record(logging.ERROR, "baton", shown.removeprefix(_COMMAND))
        elif shown and not shown.startswith((_JSON_START, _SERVICE_START)):
            shown = _record(logging.WARNING, "stderr", shown)
        if shown:
            self._stream.write(f"{shown}\n")
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """Writes what has no end of line."""
        if self._rest:
            self.write("\n")
        super().close()


def _record(level: int, logger: str, message: str, exc_info: Any = None) -> str:
    return JsonFormatter().format(logging.LogRecord(logger, level, "", 0, message, None, exc_info))


def _write_exception(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    print(
        _record(logging.CRITICAL, "baton", f"{kind.__name__}: {error}", (kind, error, trace)), file=sys.stderr
    )


def asks_for_json(line: Sequence[str]) -> bool:
    """Whether a command line, which may have mistakes, has `--log-format json`."""
    own = [*line[: line.index("--")]] if "--" in line else [*line]
    return "--log-format=json" in own or ("--log-format", "json") in pairwise(own)


def write_only_json() -> None:
    """From now on all that Python code of this process writes to stderr is JSON."""
    assert sys.__stderr__ is not None
    stream = JsonStream(sys.__stderr__)
    sys.stderr = stream  # type: ignore[assignment]
    sys.excepthook = _write_exception
    threading.excepthook = lambda raised: _write_exception(
        raised.exc_type, raised.exc_value, raised.exc_traceback
    )
    atexit.register(stream.close)


def set_up_logs(level: Level, form: Form) -> None:
    """Baton's own loggers from this level on; those of libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("baton").setLevel(level.upper())


def is_json_log(line: str) -> bool:
    """Whether a process wrote this line as JSON."""
    return line.startswith(_JSON_START)


def with_service(line: str, name: str) -> str:
    """A JSON line with the name of the process that wrote it."""
    return f'{{"service": {json.dumps(name)}, {line.removeprefix("{")}'
