"""The `baton` command: one module per verb."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from baton import __version__
from baton.cli import logs
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
"""Each is a module of this package with a command of that name, which is imported only to be run."""


def make_app(verb: str | None = None) -> click.Group:
    """The command line; every verb but this one has only its summary."""
    commands = {name: click.Command(name, short_help=summary) for name, summary in VERBS.items()}
    if verb in commands:
        commands[verb] = getattr(import_module(f"baton.cli.{verb}"), verb)
    help = "Hand a request's KV cache over between any two parallel layouts."
    return click.version_option(__version__, prog_name="baton", message="%(prog)s %(version)s")(
        click.Group("baton", commands, help=help)
    )


def main() -> None:
    """Runs a command. Misuse is one line on stderr and exit code 2, a failure exit code 1."""
    line = sys.argv[1:] or ["--help"]
    if logs.asks_for_json(line):
        logs.write_only_json()
    result: Any = None
    try:
        result = make_app(line[0])(args=line, prog_name="baton", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (ConfigError, LayoutError) as error:
        _fail(str(error), 2)
    except BatonError as error:
        _fail(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"baton: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
