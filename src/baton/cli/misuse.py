"""Errors of a command line, whichever copy of click raises them."""

from typing import cast

import typer

MISUSE = cast(
    "type[Exception]",
    next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"),
)
"""The root of click's errors; some releases of typer bring their own copy of click."""


def misuse_text(error: Exception) -> str:
    """What click has to say about a command line."""
    return str(error.format_message())  # type: ignore[attr-defined]
