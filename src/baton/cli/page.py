"""The page behind `baton plan --html`: one file that needs nothing but a browser."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

# In this order, and in one script element: the last one starts the page.
SCRIPTS = ("words", "report", "canvas", "header", "matrix", "pointer", "grid", "strip", "tables", "main")
_SLOT = re.compile("@@(title|style|script|report)@@")


def render_page(report_json: dict[str, Any]) -> str:
    """The report as a self-contained page; the data inside it is `report_json`, unchanged."""
    source, target = report_json["source"]["layout"], report_json["target"]["layout"]
    values = {
        "title": html.escape(f"{report_json['model']}: {source} to {target}"),
        "style": _read("page.css"),
        "script": "\n".join(_read(f"{name}.js") for name in SCRIPTS),
        "report": _script_json(report_json),
    }
    # One pass over the template: what is put in is never searched for slots.
    return _SLOT.sub(lambda slot: values[slot[1]], _read("page.html"))


def _read(name: str) -> str:
    return files("baton.cli").joinpath("templates", "plan", name).read_text(encoding="utf-8")


def _script_json(value: dict[str, Any]) -> str:
    """JSON in which no text can end the script element around it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
