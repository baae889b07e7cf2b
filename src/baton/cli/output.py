"""Terminal output of commands that run the engine: progress, timings, timeline files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from baton.cli.logs import set_up_logs
from baton.engine.trace import HandoffStages
from baton.errors import ConfigError
from baton.observe import NO_MATPLOTLIB, Timeline, draw, trace
from baton.plan.printer import human_bytes, human_time

if TYPE_CHECKING:
    from baton.cli.options import ServerOptions
    from baton.engine.deployment import Deployment

PICTURE, TRACE = ".png", ".json"
REFRESH_PER_S = 4
"""Low, because the ranks need the cores."""


_log = logging.getLogger("baton.up")


class StatusLines:
    """What `baton up` says of its services: dim lines on stderr, or with --log-format json log records."""

    def __init__(self, options: ServerOptions) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.is_json = options.log_format == "json"
        if self.is_json:
            set_up_logs(options.log_level, "json")

    def say(self, text: str, level: int = logging.INFO, **fields: str) -> None:
        """One line; `fields` are for the record."""
        if self.is_json:
            _log.log(level, "%s", text, extra={"fields": fields})
        else:
            self.console.print(Text(text, style="dim"))


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal; each call of the yielded function is one step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[step]}"))
    progress = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=REFRESH_PER_S,
        disable=not console.is_terminal,
    )
    with progress as bar:
        task = bar.add_task(text, total=total, step="")
        yield lambda step: bar.update(task, advance=1, step=step)


def start_engine(deployment: Deployment) -> Deployment:
    """Starts every instance, with progress by rank."""
    num_ranks = sum(instance.sizes.layout.num_ranks for instance in deployment.instances)
    with progress_bar("loading weights", num_ranks) as advance:
        return deployment.start(advance)


def size_lines(deployment: Deployment) -> Iterator[str]:
    """The sizes of each instance, a line each."""
    for instance in deployment.instances:
        yield f"{instance.config.name}: {'; '.join(instance.sizes.lines())}"


def figures_text(figures: HandoffStages) -> str:
    """The timings of a hand-over in one line."""
    times = {
        "queue": figures.queue_s,
        "compute": figures.compute_s,
        "exposed transfer": figures.exposed_s,
        "admission": figures.admission_s,
        "ttft": figures.ttft_s,
        "tth": figures.tth_s,
    }
    words = ", ".join(f"{name} {human_time(time_s)}" for name, time_s in times.items())
    groups = "1 group" if figures.num_groups == 1 else f"{figures.num_groups} groups"
    return f"{words}; {human_bytes(figures.num_bytes)} handed over in {groups} of layers"


def check_timeline(path: Path) -> None:
    """Raises if a timeline could not be written to this file."""
    if path.suffix not in (PICTURE, TRACE):
        raise ConfigError(f"--timeline {path}: name a file that ends in {PICTURE} or {TRACE}")
    if not path.parent.is_dir():
        raise ConfigError(f"--timeline {path}: there is no folder {path.parent}; create it, or name another")


def write_timelines(timelines: Sequence[Timeline], path: Path, title: str) -> str:
    """Writes a PNG or a Perfetto trace, by the file's suffix; returns a line to print."""
    try:
        if path.suffix == PICTURE:
            return f"timeline drawn in {path}" if draw(timelines, path, title) else NO_MATPLOTLIB
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that is yours"
        ) from None
    return f"trace for ui.perfetto.dev in {path}"
