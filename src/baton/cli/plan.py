"""`baton plan`: the transfers between two layouts of a model, as text, JSON or a web page.

The page is one file that needs nothing but a browser.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import MISSING
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli.parser import argument, command, flag, option
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.adapters.vllm.command import VllmCommand
    from baton.plan.storage import Storage

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


@command
def plan(
    model: str | None = argument("[MODEL]", None),
    *,
    from_: str | None = option(None, "LAYOUT", "layout of the prefill instance"),
    to: str | None = option(None, "LAYOUT", "layout of the decode instance"),
    from_vllm: str | None = option(None, "ARGS", "the prefill instance as arguments of `vllm serve`"),
    to_vllm: str | None = option(None, "ARGS", "the decode instance as arguments of `vllm serve`"),
    tokens: int = option(MISSING, "N", "prompt length in tokens"),
    source_page: int = option(64, "P", "KV cache page size of the source in tokens"),
    target_page: int = option(64, "P", "KV cache page size of the target in tokens"),
    source_dp: int = option(0, "I", "data-parallel group of the source"),
    target_dp: int = option(0, "J", "data-parallel group of the target"),
    skip_tokens: int = option(0, "K", "tokens of a prefix that the target already holds"),
    dtype: str = option("bf16", "D", "KV cache dtype: bf16, fp16, fp32 or fp8"),
    source_storage: str = option(
        "hnd.apart.layer",
        "S",
        "KV cache storage of the source: hnd|nhd . apart|fused . layer|page . granuleN, or a .json file",
    ),
    target_storage: str = option("hnd.apart.layer", "S", "KV cache storage of the target"),
    json_: bool = flag("print the plan as JSON"),
    html_: Path | None = option(None, "FILE", "write the plan as a web page"),
) -> None:
    """Show which rank sends what to which rank between two layouts; the plan is checked independently.

    MODEL is a model card, checkpoint folder, config.json, or specs joined by + (default: the model of the
    vLLM command).
    """
    # What follows takes longer to import than --help may take.
    from baton.adapters.vllm.command import parse_command
    from baton.plan.layout import parse_layout
    from baton.plan.models import active_parameters, load_cache
    from baton.plan.ownership import Spec
    from baton.plan.planner import plan as make_plan
    from baton.plan.printer import render
    from baton.plan.report import Report, estimates, pages_needed
    from baton.plan.routes import Prompt
    from baton.plan.steps import PackCost
    from baton.plan.storage import parse_storage

    commands = [parse_command(text) if text else None for text in (from_vllm, to_vllm)]
    for layout, vllm, name in zip((from_, to), commands, ("from", "to"), strict=True):
        if bool(layout) == (vllm is not None):
            raise ConfigError(f"give one of --{name} LAYOUT and --{name}-vllm ARGS")
    model = model or _common_model(commands)
    cache = load_cache(model)
    with_tokens = sorted({part.group for part in cache.components if part.extent.has_tokens})
    prompt = Prompt(tokens, dict.fromkeys(with_tokens, skip_tokens) if skip_tokens else {})
    if not 0 <= skip_tokens <= tokens:
        raise ConfigError(
            f"--skip-tokens must be 0 to {tokens}, the length of the prompt, found {skip_tokens}"
        )
    specs = []
    for vllm, layout, storage, page in (
        (commands[0], from_, source_storage, source_page),
        (commands[1], to, target_storage, target_page),
    ):
        if vllm is not None:
            declared = parse_storage(vllm.storage, vllm.block_tokens, vllm.dtype)
            spec = Spec(parse_layout(vllm.layout(cache.num_layers)), cache, declared)
            specs.append(Spec(spec.layout, cache, declared.with_pages(pages_needed(spec, prompt))))
            continue
        if storage.endswith(".json"):
            specs.append(Spec(parse_layout(layout), cache, _read_storage(Path(storage))))
            continue
        spec = Spec(parse_layout(layout), cache, parse_storage(storage, page, dtype))
        specs.append(Spec(spec.layout, cache, spec.storage.with_pages(pages_needed(spec, prompt))))
    report = Report(model, make_plan(*specs, source_dp, target_dp), prompt, PackCost())
    contract = report.as_json() | {"skip_tokens": skip_tokens}
    if html_ is not None:
        _write(html_, render_page(contract))
    if json_:
        print(json.dumps(contract))
    else:
        parameters = active_parameters(model)
        print(render(report, estimates(report, parameters), parameters), end="")


def _common_model(commands: Sequence[VllmCommand | None]) -> str:
    """The model that the vLLM commands name; they have to name the same one."""
    models = {command.model for command in commands if command is not None} - {""}
    if len(models) != 1:
        named = f"name {' and '.join(sorted(models))}" if models else "name no model"
        raise ConfigError(f"the commands {named}; give the model that both serve as the argument MODEL")
    return models.pop()


def _read_storage(path: Path) -> Storage:
    """The storage that an engine declares, with its page size, dtype and placements."""
    from baton.plan.wire import storage_from_bytes

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a file with a storage") from None
    try:
        return storage_from_bytes(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that exists"
        ) from None
