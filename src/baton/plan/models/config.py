"""Hugging Face configs: from a config.json to the layers of a model.

Draft layers that a config announces (num_nextn_predict_layers, mtp_num_hidden_layers) are not added: they are
cached only where a draft runs. `read_cache` adds one on request, and so does a spec, as in
`deepseek-v3+draft.latent:layers=1,dim=576`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from baton.errors import ConfigError
from baton.plan.cache import Cache
from baton.plan.models import families
from baton.plan.models.fields import Family, Fields
from baton.plan.models.parts import Part, draft_of, stack
from baton.plan.models.quoting import shown


def read_config(values: object, where: str) -> Part:
    """The layers that a config describes; `where` names it in messages."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: holds {shown(values)}; a config is a JSON object")
    family, stated = _model(values, where)
    fields = Fields(where, {**family.defaults, **stated})
    return Part(fields.num_layers, family.read(fields), active_parameters=_active_parameters(values, where))


def read_cache(values: object, where: str, *, has_draft: bool = False) -> Cache:
    """What a model with this config caches, and with its own draft layer where one runs."""
    part = read_config(values, where)
    return stack((part, draft_of(part)) if has_draft else (part,))


def _model(values: Mapping[str, object], where: str) -> tuple[Family, Mapping[str, object]]:
    """The family of a config and the fields of its language model, which a multimodal config nests."""
    family = _family(values.get("model_type"), where)
    text = values.get("text_config")
    if text is None:
        return family, values
    if not isinstance(text, Mapping):
        raise ConfigError(f"{where}: text_config is {shown(text)}; it must be a JSON object")
    return (_family(text["model_type"], where) if "model_type" in text else family), text


def _family(model_type: object, where: str) -> Family:
    known = _families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{where}: model_type {shown(model_type)} is not supported; "
            f"use one of {', '.join(known)}, or spell the layers out as a spec"
        )
    return known[model_type]


@cache
def _families() -> dict[str, Family]:
    """Every family by model_type: what the modules of the folder list."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        found |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return dict(sorted(found.items()))


def _active_parameters(values: Mapping[str, object], where: str) -> float | None:
    """What the field `baton` says, which our own cards have and other configs may."""
    extra = values.get("baton")
    count = extra.get("active_parameters") if isinstance(extra, Mapping) else None
    if count is None:
        return None
    if not isinstance(count, int | float) or isinstance(count, bool) or not 0 < count < float("inf"):
        raise ConfigError(f"{where}: active_parameters is {shown(count)}; it must be a number above 0")
    return float(count)
