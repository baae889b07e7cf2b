"""What a person sees of a deployment that starts: a row per part on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.cli.deployment.options import Options
from baton.cli.deployment.running import Kept, is_log

REFRESH_PER_S = 4
"""Few: the ranks need the cores."""
QUESTION = "Explain in one sentence what a relay race is."


class Screen:
    """Everything but the answer to 'where do I ask': on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, name: str, line: str) -> None:
        """One line of, or about, a part."""
        self.console.print(Text(f"{name}: {line}", style="dim"))

    def say_unlogged(self, name: str, line: str) -> None:
        """The same without what goes to a part's log."""
        if not is_log(line):
            self.say(name, line)

    def print(self, line: str, style: str = "") -> None:
        """One line as it is."""
        self.console.print(Text(line, style=style))

    @contextmanager
    def starting(self) -> Iterator[Callable[[Kept], None]]:
        """Shows how far the parts are, each time one has got further; the rows go when all are there."""
        if not self.console.is_terminal:
            yield lambda kept: self.print(f"{_title(kept)}: {kept.stage}")
            return
        rows: dict[str, Kept] = {}
        with Live(console=self.console, refresh_per_second=REFRESH_PER_S, transient=True) as live:

            def show(kept: Kept) -> None:
                rows[kept.part.name] = kept
                live.update(_table(rows))

            yield show


def _table(rows: dict[str, Kept]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for kept in rows.values():
        mark = "[green]ready[/green]" if kept.is_ready else Text(kept.stage)
        table.add_row(Text(_title(kept)), mark)
    return table


def _title(kept: Kept) -> str:
    layout = kept.part.layout
    return f"{kept.part.name} ({layout})" if layout else kept.part.name


def chat_line(url: str, options: Options) -> str:
    """A command that talks to it."""
    file = options.front.api_key_file
    words = [f"baton chat --url {url}"]
    words += [f"--api-key-file {shlex.quote(str(file))}"] if file else []
    words += [f"--tls-ca {shlex.quote(options.front.tls.authority)}"] if options.front.tls else []
    return " ".join(words)


def curl_line(url: str, options: Options) -> str:
    """A question that a shell can ask."""
    body = {"model": options.model, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    words = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "'Content-Type: application/json'"]
    if options.front.tls is not None:
        words[1:1] = ["--cacert", shlex.quote(options.front.tls.authority)]
    if options.front.api_key_file is not None:
        file = shlex.quote(str(options.front.api_key_file))
        words += ["-H", f'"Authorization: Bearer $(head -n 1 {file})"']
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])
