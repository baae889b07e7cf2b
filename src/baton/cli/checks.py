"""What commands refuse before their slow imports: PyTorch, NumPy and the HTTP server take seconds."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import click

from baton.checkpoint.names import check_dtype, check_model
from baton.cli.options import EngineOptions
from baton.cli.parser import given, parse
from baton.errors import ConfigError
from baton.plan.layout import parse_layout
from baton.settings import check_registry


def check_first(model: str, layouts: Iterable[str], dtype: str = "auto", registry: str | None = None) -> None:
    """Raises on a model, layout, dtype or registry that is none; others are left to `engine.config`."""
    for layout in layouts:
        parse_layout(layout)
    check_model(model)
    check_dtype(dtype)
    if registry is not None:
        check_registry(registry)


def check_transport(text: str) -> None:
    """Raises on a wrong transport or option, a missing library, and a host that is not of this machine."""
    # It imports NumPy, which other checks do without: the options of a transport are in its module.
    from baton.transport import check_library, parse_transport
    from baton.transport.common.listener import open_server

    name, options = parse_transport(text)
    check_library(name)
    if "host" in options:
        open_server(options["host"], 0).close()


def side_words(option: str, text: str | None) -> list[str]:
    """The words of --prefill-args or --decode-args."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None


def side_options(option: str, text: str | None) -> dict[str, Any]:
    """What --prefill-args or --decode-args gives, read as `baton serve` reads it."""
    try:
        return given(parse(EngineOptions, side_words(option, text)))
    except click.NoSuchOption as error:
        usable = ", ".join(
            f"--{option.name.replace('_', '-')}" for option in fields(EngineOptions) if option.metadata
        )
        raise ConfigError(
            f"{option}: {error.option_name} cannot be set for one side; these can: {usable}"
        ) from None
    except click.ClickException as error:
        raise ConfigError(f"{option}: {error.format_message()}") from None


def check_same_transport(transports: Iterable[str]) -> None:
    """Raises ConfigError where the sides could not reach each other."""
    names = sorted({transport.partition(":")[0] for transport in transports})
    if len(names) > 1:
        raise ConfigError(
            f"transports {' and '.join(names)} cannot reach each other; give both sides the same"
        )
