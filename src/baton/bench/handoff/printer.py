"""Tables and summaries of hand-overs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from rich.table import Table

from baton.bench.handoff.control import CONTROL_S_TARGET, Control
from baton.bench.handoff.figures import Figures
from baton.bench.handoff.run import Measured
from baton.bench.handoff.scene import Scene
from baton.bench.handoff.sweep import Sweep
from baton.plan.printer import human_bytes

COLUMNS_MAX = 5


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def title_of(scene: Scene) -> str:
    """What is handed over, between whom and how."""
    sides = f"{scene.source.layout} to {scene.target.layout}"
    link = f", {scene.link_bytes_per_s / 1e9:g} GB/s a rank" if scene.link_bytes_per_s else ""
    return f"{scene.model}, {scene.num_tokens} tokens, {sides} by {scene.transport}{link}"


def measured_table(found: Measured) -> Table:
    """A column for each run."""
    table = Table("", title=f"{title_of(found.scene)}, {found.pace.policy}")
    rows: dict[str, Callable[[Figures], str]] = {
        "tth": lambda run: _ms(run.tth_s),
        "compute": lambda run: _ms(run.compute_s),
        "exposed": lambda run: _ms(run.exposed_s),
        "T": lambda run: _ms(run.transfer_s),
        "efficiency": lambda run: f"{run.efficiency:.3f}",
        "bound": lambda run: f"{run.bound:.3f}",
        "control": lambda run: _ms(run.control_s),
        "producer late": lambda run: _ms(run.late_s),
        "groups": lambda run: str(run.num_groups),
        "copies": lambda run: str(run.num_copies),
        "spans": lambda run: str(run.num_spans),
        "bytes": lambda run: human_bytes(run.num_bytes),
    }
    shown = found.runs[:COLUMNS_MAX]
    for index in range(len(shown)):
        table.add_column(f"run {index + 1}", justify="right")
    for name, text in rows.items():
        table.add_row(name, *(text(run) for run in shown))
    return table


def measured_summary(found: Measured) -> str:
    """One line."""
    verdict = found.verdict
    text = "every byte right" if found.is_right else f"{verdict.num_bytes - verdict.num_right} BYTES WRONG"
    return (
        f"tth {_ms(found.middle('tth_s'))}, exposed {_ms(found.middle('exposed_s'))} of T "
        f"{_ms(found.middle('transfer_s'))}, efficiency {found.middle('efficiency'):.3f} of bound "
        f"{found.middle('bound'):.3f}, control {_ms(found.middle('control_s'))}; {text} "
        f"({verdict.num_bytes} compared)"
    )


def control_table(found: Control) -> Table:
    """Times alone, and the count of those at once."""
    scene = found.scene
    title = f"control, {scene.source.layout} to {scene.target.layout} by {scene.transport}"
    table = Table("measurement", "best", "median", "worst", title=title)
    for name, values in (("tth", found.tth_s), ("control", found.control_s)):
        texts = (_ms(value) for value in (min(values), median(values), max(values)))
        table.add_row(f"{name} of {len(values)} one after another", *texts)
    rate = found.num_transfers / found.elapsed_s if found.elapsed_s else 0.0
    table.add_row(f"{found.num_transfers} transfers, {found.num_at_once} at once", "", f"{rate:.0f}/s", "")
    return table


def control_summary(found: Control) -> str:
    """One line."""
    word = "met" if found.control_s_median <= CONTROL_S_TARGET else "missed"
    wrong = found.num_bytes - found.num_right
    causes = "; ".join(f"{count} x {text}" for text, count in sorted(found.failures.items())[:3])
    return (
        f"control {_ms(found.control_s_median)} median (at most {_ms(CONTROL_S_TARGET)}: {word}); "
        f"{found.num_transfers} transfers, {found.num_at_once} at once: {found.num_failed} failed, "
        f"{found.num_held} held, {wrong} of {found.num_bytes} bytes wrong" + (f"; {causes}" if causes else "")
    )


def sweep_table(found: Sweep) -> Table:
    """Efficiency of every policy, by the ratio of compute to transfer, with the bound."""
    ratios = list(dict.fromkeys(row.ratio for row in found.rows))
    table = Table("", title=f"efficiency, {title_of(found.scene)}")
    for ratio in ratios:
        table.add_column(f"C/T {ratio:g}", justify="right")
    rows = {ratio: found.at(ratio) for ratio in ratios}
    table.add_row("bound", *(f"{rows[ratio]['cost'].middle('bound'):.3f}" for ratio in ratios))
    for policy in dict.fromkeys(row.policy for row in found.rows):
        table.add_row(policy, *(f"{rows[ratio][policy].efficiency:.3f}" for ratio in ratios))
    table.add_section()
    table.add_row("cost of bound", *(f"{rows[ratio]['cost'].of_bound:.3f}" for ratio in ratios))
    table.add_row("cost behind best", *(f"{found.behind(ratio) * 100:+.1f}%" for ratio in ratios))
    table.add_row("groups of cost", *(f"{rows[ratio]['cost'].middle('num_groups'):g}" for ratio in ratios))
    return table


def sweep_summary(found: Sweep) -> str:
    """One line."""
    ratios = list(dict.fromkeys(row.ratio for row in found.rows))
    least = min(found.at(ratio)["cost"].of_bound for ratio in ratios)
    behind = max(found.behind(ratio) for ratio in ratios)
    text = "every byte right" if found.is_right else "BYTES WRONG"
    return (
        f"cost reaches at least {least:.3f} of bound (0.95 wanted) and is at most {behind * 100:.1f}% "
        f"behind another policy (2% wanted); T {_ms(found.serial.busiest_s)}, "
        f"{_ms(found.serial.overhead_s)} lost per group; {text}"
    )
