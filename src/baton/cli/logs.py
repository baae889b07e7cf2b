"""Logs of the commands that run servers: lines for people on stderr, or one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Form: TypeAlias = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JSON_START = '{"time": '


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
