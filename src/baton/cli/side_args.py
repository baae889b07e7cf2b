"""Options of one side of a deployment: `--prefill-args` and `--decode-args`.

They are options of `baton serve`, read by its own parser, so that a mistake is found before anything starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import not_
from typing import Any

import typer

from baton.cli import MISUSE, misuse_text
from baton.cli.serve import serve
from baton.errors import ConfigError
from baton.transport import parse_transport
from baton.units import parse_speed

ENGINE_FIELDS: Mapping[str, str] = {
    "base_gpu_id": "base_gpu_id",
    "chunk_tokens": "chunk_tokens",
    "device": "device",
    "dtype": "dtype",
    "endpoint_process": "has_endpoint_process",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_layout": "kv_layout",
    "link": "link_bytes_per_s",
    "max_model_len": "context_max",
    "max_num_seqs": "sequences_max",
    "no_prefix_caching": "has_prefix_cache",
    "overlap": "policy",
    "packing": "packing",
    "page_tokens": "page_tokens",
    "pool_tokens": "pool_tokens",
    "progress_s": "progress_s",
    "queue": "queue_max",
    "silence_s": "silence_s",
    "staging_mb": "staging_mb",
    "transfer_timeout": "total_s",
    "transport": "transport",
    "ungranted_share": "ungranted_share_max",
    "verify": "is_verified",
}
"""Parameters of `baton serve` that one side may have to itself, and the fields of EngineConfig that they set.

The others are the same for all instances, or belong to the deployment."""
_PARSERS: Mapping[str, Callable[[Any], object]] = {"link": parse_speed, "no_prefix_caching": not_}


@dataclass(frozen=True, slots=True)
class SideArgs:
    """What a user gave for one side."""

    words: tuple[str, ...] = ()
    """As a command line of `baton serve`."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """As fields of EngineConfig."""


ALIKE = SideArgs()
"""Nothing: the options of the deployment hold."""


def parse_side_args(option: str, text: str | None) -> SideArgs:
    """Reads options of `baton serve`; raises ConfigError on what one side cannot have."""
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    command = typer.main.get_command(app)
    try:
        context = command.make_context("serve", ["--model", "", *words], help_option_names=[])
    except MISUSE as error:
        raise ConfigError(f"{option}: {misuse_text(error)}") from None
    engine_options = {}
    for parameter in command.params:
        name = str(parameter.name)
        value, source = context.params[name], context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or (name == "model" and not value):
            continue
        if name not in ENGINE_FIELDS:
            usable = ", ".join(f"--{known.replace('_', '-')}" for known in ENGINE_FIELDS)
            raise ConfigError(f"{option}: {parameter.opts[0]} is not an option of one side; use {usable}")
        engine_options[ENGINE_FIELDS[name]] = _PARSERS[name](value) if name in _PARSERS else value
    return SideArgs(tuple(words), engine_options)


def check_same_transport(transports: Iterable[str]) -> None:
    """Raises ConfigError where the sides could not reach each other."""
    names = sorted({parse_transport(transport)[0] for transport in transports})
    if len(names) > 1:
        raise ConfigError(
            f"transports {' and '.join(names)} cannot reach each other; give both sides the same"
        )
