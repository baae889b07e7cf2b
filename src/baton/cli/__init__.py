"""The `baton` command: one file per verb."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, cast

import typer

from baton import __version__
from baton.errors import BatonError, ConfigError, LayoutError

VERBS = {
    "plan": "Show which rank sends what to which rank between two layouts.",
    "demo": "Hand a real model over between two layouts; check every token.",
    "generate": "Answer a prompt, in one layout or two.",
    "doctor": "Show which transports, devices and kernel features work here.",
    "registry": "Run a registry, where instances and routers find each other.",
    "serve": "Serve a model over HTTP: one instance, of a pair or alone.",
    "route": "Route requests to prefill and decode instances.",
    "drain": "Make an instance refuse new requests and finish those it has.",
    "up": "Start a registry, instances and a router on this machine.",
    "chat": "Chat with a model.",
    "sim": "Run instances under random faults, and check every transfer.",
    "bench": "Measure Baton.",
}
"""Each is a module of this package with a function, or a group of commands, of that name."""

MISUSE = cast(
    "type[Exception]",
    next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"),
)
"""The root of click's errors; some releases of typer bring their own copy of click."""


def misuse_text(error: Exception) -> str:
    """What click has to say about a command line."""
    return str(error.format_message())  # type: ignore[attr-defined]


def make_app(verb: str | None = None) -> typer.Typer:
    """The command line with one verb, or with none that runs: the overview imports no verb."""
    app = typer.Typer(
        name="baton",
        help="Hand a request's KV cache over between any two parallel layouts.",
        add_completion=False,
        rich_markup_mode=None,  # plain help: no <bool> after flags, nothing cut off, and half the time
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)  # with one verb alone, it still has to be named
    if verb not in VERBS:
        for name, summary in VERBS.items():
            app.command(name, help=summary)(_root)
        return app
    command = getattr(import_module(f"baton.cli.{verb}"), verb)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=verb)
    else:
        app.command()(command)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"baton {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """The options of `baton` itself."""


def main() -> None:
    """Runs a command. Misuse is one line on stderr and exit code 2, a failure exit code 1."""
    words = sys.argv[1:] or ["--help"]
    try:
        result = make_app(words[0])(args=words, standalone_mode=False)
    except MISUSE as error:
        _fail(misuse_text(error), 2)
    except (ConfigError, LayoutError) as error:
        _fail(str(error), 2)
    except BatonError as error:
        _fail(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    else:
        sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    print(f"baton: {line}", file=sys.stderr)
    sys.exit(code)
