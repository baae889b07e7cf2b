"""From the bytes of a request to its struct, or to a Problem that says which field is wrong and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from baton.server.bodies.refused import check_fields, check_values
from baton.web.problems import Problem, refused

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def reader_of(kind: type[T]) -> Callable[[bytes], T]:
    """What reads bodies of one kind; reuse it."""
    decoder = msgspec.json.Decoder(kind)

    def read(body: bytes) -> T:
        try:
            found = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"the body is no JSON ({error}); send a JSON object", code="no_json") from None
        check_fields(body)
        params = getattr(found, "sampling_params", None)
        if params is not None:
            inner = msgspec.json.decode(body)["sampling_params"]
            check_values(inner, "sampling_params.")
        return found

    return read


def _wrong(text: str, body: bytes) -> Problem:
    """What the decoder says of a field, with the value that it found there."""
    match = _AT.match(text)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    param = path.removeprefix(".")
    if missing := _MISSING.match(what):
        param = f"{param}.{missing[1]}".lstrip(".")
        return Problem(400, f"{param} is missing; give it", param=param, code="missing_field")
    remedy = what.replace("`", "").replace("Expected", "expected").replace("null", "nothing")
    if not param:
        return Problem(400, f"the body: {remedy}; send a JSON object", code="wrong_type")
    try:
        value = _value_at(msgspec.json.decode(body), path)
    except (LookupError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Problem(400, f"{param}: {remedy}", param=param, code="wrong_type")
    return refused(param, value, remedy, code="wrong_type")


def _value_at(found: Any, path: str) -> Any:
    for name, place in _STEP.findall(path):
        found = found[int(place)] if place else found[name]
    return found
