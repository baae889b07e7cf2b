"""What a user may name a model by: a folder or config.json, a built-in card, or a spec."""

from __future__ import annotations

import json
import os.path
from functools import cache
from importlib import resources
from pathlib import Path

from baton.errors import ConfigError
from baton.plan.models.config import read_config
from baton.plan.models.parts import Part
from baton.plan.models.quoting import shown, suggestion
from baton.plan.models.spec import EXAMPLE, parse_spec

_SUFFIX = ".json"
_CARDS = resources.files(__package__) / "cards"


@cache
def card_names() -> tuple[str, ...]:
    """The built-in cards, sorted."""
    names = (entry.name for entry in _CARDS.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def read_parts(text: str) -> tuple[Part, ...]:
    """The parts that MODEL text joins with `+`; a path may itself contain one."""
    path = _config_path(text)
    if path:
        return (_read_file(path),)
    return tuple(_read_part(part, text) for part in text.split("+"))


def _read_part(part: str, text: str) -> Part:
    path = _config_path(part)
    if path:
        return _read_file(path)
    if part in card_names():
        return read_config(json.loads((_CARDS / (part + _SUFFIX)).read_text("utf-8")), f"card {part}")
    if ":" in part:
        return parse_spec(part)
    raise _unknown(part, text)


def _config_path(text: str) -> str | None:
    """The config file that `text` leads to, if it does; os.path answers no where a path is malformed."""
    inside = os.path.join(text, "config.json")
    if text and os.path.isfile(inside):
        return inside
    return text if text.endswith(_SUFFIX) and os.path.isfile(text) else None


def _read_file(path: str) -> Part:
    where = f"config {shown(path)}"
    try:
        values: object = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); check the path and its rights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({_first_line(error)}); repair the file") from error
    return read_config(values, where)


def _first_line(error: Exception) -> str:
    return ascii(str(error)).strip("'\"")


def _unknown(part: str, text: str) -> ConfigError:
    if not part:
        return ConfigError(
            f"model {shown(text)} has an empty part; write a card, a path or a spec, joined by '+'"
        )
    if part.endswith(_SUFFIX):
        return ConfigError(f"there is no file {shown(part)}; check the path")
    if os.path.isdir(part):
        return ConfigError(f"folder {shown(part)} has no config.json; name a folder that does")
    return ConfigError(
        f"unknown model {shown(part)}{suggestion(part, card_names())}; "
        f"use a card ({', '.join(card_names())}), a folder with a config.json, or a spec such as {EXAMPLE}"
    )
