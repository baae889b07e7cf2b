"""The table and the summary of overlap."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from baton.bench.overlap.figures import Row, link_text
from baton.bench.overlap.options import COST, Options

HEADS = (
    "tth", "compute", "exposed", "efficiency", "bound", "of bound", "complete", "slow-down", "groups",
)  # fmt: skip


def table_of(rows: Sequence[Row], options: Options) -> Table:
    """A row for each policy; sections by prompt length and link."""
    title = f"{options.model}, {options.prefill} to {options.decode}, {options.dtype}, {options.device}"
    table = Table("tokens", "link", "policy", title=title)
    for head in HEADS:
        table.add_column(head, justify="right")
    last = None
    for row in rows:
        if row.case != last:
            last = row.case
            table.add_section()
            place = (str(row.case.num_tokens), link_text(row.case.link_bytes_per_s))
            table.add_row(*place, "compute-only", "", _ms(row.floor_s), _ms(row.serial_s) + " = T")
        table.add_row("", "", row.policy, *_texts(row))
    return table


def _texts(row: Row) -> tuple[str, ...]:
    return (
        _ms(row.middle(lambda run: run.tth_s)),
        _ms(row.middle(lambda run: run.compute_s)),
        _ms(row.middle(lambda run: run.exposed_s)),
        f"{row.middle(lambda run: run.efficiency):.3f}",
        f"{row.middle(lambda run: run.bound):.3f}",
        f"{row.of_bound:.3f}",
        f"{row.middle(lambda run: run.complete):.3f}",
        f"{row.middle(lambda run: run.slowed) * 100:+.1f}%",
        f"{row.middle(lambda run: run.num_groups):g}",
    )


def summary_of(rows: Sequence[Row]) -> str:
    """One line."""
    mine = [row for row in rows if row.policy == COST]
    if not mine:
        return "cost was not measured"
    least = min(mine, key=lambda row: row.of_bound)
    return (
        f"cost reaches at least {least.of_bound:.3f} of bound "
        f"({least.case.num_tokens} tokens, {link_text(least.case.link_bytes_per_s)}), "
        f"complete within {max(row.middle(lambda run: run.complete) for row in mine):.3f} of compute-only"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
