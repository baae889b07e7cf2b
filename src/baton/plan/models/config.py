"""Models by name: from a built-in card, a Hugging Face config or a spec to the layers of a model.

Draft layers that a config announces (num_nextn_predict_layers, mtp_num_hidden_layers) are not added: they are
cached only where a draft runs. `read_cache` adds one on request, and so does a spec, as in
`deepseek-v3+draft.latent:layers=1,dim=576`.
"""

from __future__ import annotations

import importlib
import json
import os.path
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.plan.cache import Cache
from baton.plan.models import families
from baton.plan.models.fields import CacheFamily, Fields, shown, suggestion
from baton.plan.models.parts import EXAMPLE, ModelPart, draft_of, parse_spec, stack

_SUFFIX = ".json"
_CARDS = resources.files(__package__) / "cards"


@cache
def card_names() -> tuple[str, ...]:
    """The built-in cards, sorted."""
    names = (entry.name for entry in _CARDS.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def read_card(name: str) -> dict[str, Any]:
    """A built-in card: the config of a model, at least as far as its cache depends on it."""
    card: dict[str, Any] = json.loads((_CARDS / (name + _SUFFIX)).read_text("utf-8"))
    return card


def read_parts(text: str) -> tuple[ModelPart, ...]:
    """The parts that MODEL text joins with `+`; a path may itself contain one."""
    path = _config_path(text)
    if path:
        return (_read_file(path),)
    return tuple(_read_part(part, text) for part in text.split("+"))


def _read_part(part: str, text: str) -> ModelPart:
    path = _config_path(part)
    if path:
        return _read_file(path)
    if part in card_names():
        return read_config(read_card(part), f"card {part}")
    if ":" in part:
        return parse_spec(part)
    raise _unknown(part, text)


def _config_path(text: str) -> str | None:
    """The config file that `text` leads to, if it does; os.path answers no where a path is malformed."""
    inside = os.path.join(text, "config.json")
    if text and os.path.isfile(inside):
        return inside
    return text if text.endswith(_SUFFIX) and os.path.isfile(text) else None


def _read_file(path: str) -> ModelPart:
    where = f"config {shown(path)}"
    try:
        values: object = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); check the path and its permissions"
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


def read_config(values: object, where: str) -> ModelPart:
    """The layers that a config describes; `where` names it in messages."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: holds {shown(values)}; a config is a JSON object")
    stated = text_config(values, where)
    family = _family(stated.get("model_type"), where)
    fields = Fields(where, {**family.defaults, **stated})
    return ModelPart(
        fields.num_layers, family.read(fields), active_parameters=_active_parameters(values, where)
    )


def read_cache(values: object, where: str, *, has_draft: bool = False) -> Cache:
    """What a model with this config caches, and with its own draft layer where one runs."""
    part = read_config(values, where)
    return stack((part, draft_of(part)) if has_draft else (part,))


def text_config(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config of the language model, which a multimodal one nests; of what both state, the outer one's."""
    text = values.get("text_config")
    if text is None:
        return values
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config is {shown(text)}; it must be a JSON object")
    outer = {key: value for key, value in values.items() if value is not None and not key.endswith("_config")}
    model_type = text.get("model_type", f"{values.get('model_type')}_text")
    quantisation = {"quantization_config": values.get("quantization_config")}
    return {**quantisation, **text, **outer, "model_type": model_type}


def _family(model_type: object, where: str) -> CacheFamily:
    known = _families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{where}: model_type {shown(model_type)} is not supported; "
            f"use one of {', '.join(known)}, or spell the layers out as a spec"
        )
    return known[model_type]


@cache
def _families() -> dict[str, CacheFamily]:
    """Every family by model_type: what the modules of the folder list."""
    known: dict[str, CacheFamily] = {}
    for module in pkgutil.iter_modules(families.__path__):
        known |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return dict(sorted(known.items()))


def _active_parameters(values: Mapping[str, object], where: str) -> float | None:
    """What the field `baton` says, which our own cards have and other configs may."""
    extra = values.get("baton")
    count = extra.get("active_parameters") if isinstance(extra, Mapping) else None
    if count is None:
        return None
    if not isinstance(count, int | float) or isinstance(count, bool) or not 0 < count < float("inf"):
        raise ConfigError(f"{where}: active_parameters is {shown(count)}; it must be a number above 0")
    return float(count)
