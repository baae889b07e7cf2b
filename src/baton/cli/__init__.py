"""The `baton` command: one file per verb."""

from __future__ import annotations

import sys

import typer

from baton.cli import bench
from baton.cli.chat import chat
from baton.cli.demo import demo
from baton.cli.doctor import doctor
from baton.cli.drain import drain
from baton.cli.generate import generate
from baton.cli.output import MISUSE, misuse_text
from baton.cli.plan import plan
from baton.cli.registry import registry
from baton.cli.route import route
from baton.cli.serve import serve
from baton.cli.sim import sim
from baton.cli.up import up
from baton.errors import BatonError, ConfigError, LayoutError

app = typer.Typer(
    name="baton",
    help="Hand a request's KV cache over between any two parallel layouts.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(plan)
app.command()(demo)
app.command()(generate)
app.command()(doctor)
app.command()(registry)
app.command()(serve)
app.command()(route)
app.command()(drain)
app.command()(up)
app.command()(chat)
app.command()(sim)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs a command. Misuse is one line on stderr and exit code 2, a failure exit code 1."""
    try:
        result = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
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
