"""A plan as text in columns, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd

from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import Spec, cuts, page_spaces
from baton.plan.ranges import Ranges, from_ids, merged, text, to_ids
from baton.plan.report import FLOPS_PER_RANK, Estimate, Report
from baton.plan.routes import BoundRoute
from baton.plan.tokens import TokenSet

ROWS_MAX = 32


def render(report: Report, estimates: Sequence[Estimate], active_parameters: float | None) -> str:
    """The whole page."""
    sides = (("source", report.plan.source), ("target", report.plan.target))
    memory = [_memory(side, spec) for side, spec in sides if spec.storage.placements]
    sections = [_head(report), _components(report), *memory, _routes(report), _loads(report), _copies(report)]
    return "\n\n".join([*sections, _costs(estimates, active_parameters)]) + "\n"


def human_bytes(num_bytes: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    raise AssertionError


def human_time(seconds: float) -> str:
    """0.0123 -> 12.3 ms."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Rows of cells, aligned; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def _head(report: Report) -> str:
    plan, prompt = report.plan, report.prompt
    ends = (_end(plan.source, plan.source_dp), _end(plan.target, plan.target_dp))
    held = max(prompt.held.values(), default=0)
    return (
        f"{report.model}: {ends[0]} -> {ends[1]}\n"
        f"{prompt.num_tokens} tokens{f', {held} held by the target' if held else ''}; "
        f"{human_bytes(sum(report.bytes_by_source))} in {len(report.routes)} routes; "
        "every target byte proven to be sent once, by an owner"
    )


def _end(spec: Spec, dp: int) -> str:
    group = f", dp group {dp} of {spec.layout.size('dp')}" if spec.layout.size("dp") > 1 else ""
    return f"{spec.layout.text} ({spec.layout.num_ranks} ranks{group}, page {spec.storage.page_tokens})"


def _components(report: Report) -> str:
    rows = [("component", "layers", "units", "one unit", "per", "copies of it: source, target")]
    for part in report.plan.target.cache.components:
        dtype = report.plan.source.storage.dtype_of(part)
        rows.append(
            (
                part.name,
                _layers(part.layers),
                f"{part.units.count} {part.units.name}s" if part.units else "none",
                human_bytes(part.num_elements * item_bytes(dtype)),
                _extent(part),
                ", ".join(str(count) for count in _num_mirrors(report, part)),
            )
        )
    return "Components\n" + columns(rows) + "\n  mirrors: " + _mirror_choice(report)


def _memory(side: str, spec: Spec) -> str:
    """Where the memory of a side is, as its engine declares it."""
    rows = [("component", "stage", "tp", "buffer", "of", "first byte", "strides", "layers")]
    for declared in spec.storage.placements[:ROWS_MAX]:
        strides = dict(declared.strides)
        layer_stride = strides.pop("layer", None)
        layers = "one" if layer_stride is None else f"every {layer_stride}"
        if declared.layer_offsets:
            offsets = ", ".join(f"+{offset}" for offset in declared.layer_offsets[:4])
            layers = f"at {offsets}{', ...' if len(declared.layer_offsets) > 4 else ''}"
        rows.append(
            (
                declared.component,
                str(declared.stage),
                "all" if declared.tp is None else str(declared.tp),
                declared.buffer,
                human_bytes(declared.buffer_bytes),
                str(declared.offset),
                ", ".join(f"{axis} {stride}" for axis, stride in strides.items()) or "none",
                layers,
            )
        )
    more = len(spec.storage.placements) - ROWS_MAX
    lines = [f"Memory of the {side}, as declared", columns(rows)]
    if more > 0:
        lines.append(f"  and {more} more placements; --json lists them")
    return "\n".join([*lines, *_overlays(spec)])


def _overlays(spec: Spec) -> list[str]:
    """The groups that lie in the same bytes, and on which ranks."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank in range(spec.layout.num_ranks):
        by_space: dict[str, list[str]] = {}
        for group, space in page_spaces(spec, rank).items():
            by_space.setdefault(space, []).append(group)
        for groups in by_space.values():
            if len(groups) > 1:
                ranks.setdefault(tuple(groups), []).append(rank)
    return [
        f"  groups {', '.join(groups)} overlay each other on ranks {text(from_ids(members))}: "
        "a page id belongs to one of them at a time"
        for groups, members in ranks.items()
    ]


def _extent(component: Component) -> str:
    if not component.extent.has_tokens:
        return "layer"
    window = component.extent.window
    return f"layer and token, last {window} tokens" if window else "layer and token"


def _layers(layers: Ranges) -> str:
    """Ranges for people, regular alternations shortened."""
    if len(layers) <= 4:
        return text(layers)
    return f"{sum(stop - start for start, stop in layers)} of {layers[0][0]}-{layers[-1][1] - 1}"


def _num_mirrors(report: Report, component: Component) -> tuple[int, int]:
    """How many ranks of a group hold the same box, at the source and at the target."""
    given = report.plan.source.cache.by_name[component.name]
    both = (cuts(report.plan.source, given, "source"), cuts(report.plan.target, component, "target"))
    source, target = (
        len(cut.units) // len(set(cut.units)) * (len(cut.shares) // len(set(cut.shares))) for cut in both
    )
    return source, target


def _mirror_choice(report: Report) -> str:
    """One line on how source ranks that hold the same data share the sending."""
    choices: dict[str, list[str]] = {}
    for part in report.plan.target.cache.components:
        choice = _choice(*_num_mirrors(report, part), part.extent.has_tokens)
        choices.setdefault(choice, []).append(part.name)
    return "; ".join(f"{', '.join(names)}: {choice}" for choice, names in choices.items())


def _choice(num_sources: int, num_targets: int, has_tokens: bool) -> str:
    common = gcd(num_sources, num_targets)
    sources, targets = num_sources // common, num_targets // common
    if num_sources == 1:
        return "one owner each, nothing to choose"
    unit = "pages" if has_tokens else "layers"
    if sources == 1:
        return f"each of {num_sources} mirrors serves {targets} target{'s' if targets > 1 else ''} in whole"
    if targets == 1:
        return f"{unit} dealt round robin over {sources} mirrors for each target"
    return f"{unit} dealt in turns of {sources} so that {sources} mirrors share {targets} targets evenly"


def _routes(report: Report) -> str:
    for key in (_exact, _by_unit, _by_layer, _by_component):
        rows = _group(report, key)
        if len(rows) <= ROWS_MAX:
            break
    heads = ("source", "target", "components", "layers", "units", "tokens", "routes", "bytes each")
    lines = [columns([heads, *rows[:ROWS_MAX]]) if rows else "  none: the target holds everything"]
    if len(rows) > ROWS_MAX:
        lines.append(f"  and {len(rows) - ROWS_MAX} more groups; --json lists every route")
    return "\n".join(["Routes", *lines])


def _exact(route: BoundRoute) -> tuple[object, ...]:
    return (route.source, route.target, route.layers, route.units, route.tokens)


def _by_unit(route: BoundRoute) -> tuple[object, ...]:
    return (route.layers, route.units, route.tokens)


def _by_layer(route: BoundRoute) -> tuple[object, ...]:
    return (route.layers, route.tokens)


def _by_component(route: BoundRoute) -> tuple[object, ...]:
    return (route.tokens is None,)


def _group(report: Report, key: Callable[[BoundRoute], tuple[object, ...]]) -> list[tuple[str, ...]]:
    """Routes of equal key in one row, then components of equal rows in one."""
    by_key: dict[tuple[object, ...], list[BoundRoute]] = {}
    for route in report.routes:
        by_key.setdefault((route.component, *key(route)), []).append(route)
    alike: dict[tuple[object, ...], list[tuple[str, list[BoundRoute]]]] = {}
    for (name, *rest), routes in by_key.items():
        shape = (*rest, tuple((route.source, route.target, route.layers, route.units) for route in routes))
        alike.setdefault(shape, []).append((str(name), routes))
    return [_row(report, entries) for entries in alike.values()]


def _row(report: Report, entries: list[tuple[str, list[BoundRoute]]]) -> tuple[str, ...]:
    """The cells of routes that differ in nothing that they show."""
    routes = [route for _, alike in entries for route in alike]
    low, high = (human_bytes(bound(route.num_bytes for route in routes)) for bound in (min, max))
    sets = {route.tokens for route in routes}
    units = {route.units for route in routes if route.units is not None}
    return (
        text(from_ids({route.source for route in routes})),
        text(from_ids({route.target for route in routes})),
        ", ".join(name for name, _ in entries),
        _layers(from_ids(layer for route in routes for layer in to_ids(route.layers))),
        text(merged(units)) if units else "-",
        _tokens(report, sets.pop()) if len(sets) == 1 else f"{len(sets)} sets",
        str(len(routes)),
        low if low == high else f"{low} to {high}",
    )


def _tokens(report: Report, tokens: TokenSet | None) -> str:
    if tokens is None:
        return "state"
    if tokens == ((0, report.prompt.num_tokens),):
        return "all"
    parts = [_token_item(item) for item in tokens[:3]]
    return ", ".join(parts) + (f" and {len(tokens) - 3} more" if len(tokens) > 3 else "")


def _token_item(item: Sequence[int]) -> str:
    if len(item) == 4:
        return f"{item[2]} of every {item[3]} from {item[0]}"
    return f"{item[0]}-{item[1] - 1}"


def _loads(report: Report) -> str:
    plan = report.plan
    lines = []
    for name, totals, group in (
        ("sent by source rank", report.bytes_by_source, plan.source.layout.group(plan.source_dp)),
        ("received by target rank", report.bytes_by_target, plan.target.layout.group(plan.target_dp)),
    ):
        lines.append(f"  {name}: {_by_load(totals, group)}")
    idle = text(from_ids(report.idle_sources)) if report.idle_sources else "none"
    return "Load\n" + "\n".join(lines) + f"\n  idle source ranks: {idle}"


def _by_load(totals: Sequence[int], group: Iterable[int]) -> str:
    by_load: dict[int, list[int]] = {}
    for rank in group:
        by_load.setdefault(totals[rank], []).append(rank)
    entries = sorted(by_load.items(), reverse=True)
    shown = [f"{human_bytes(load)} each ({text(from_ids(ranks))})" for load, ranks in entries[:6]]
    rest = f", and {len(entries) - 6} smaller loads" if len(entries) > 6 else ""
    return ", ".join(shown) + rest


def _copies(report: Report) -> str:
    sizes = list(report.copy_sizes)
    if not sizes:
        return "Copies\n  none"
    span = " to ".join(dict.fromkeys((human_bytes(sizes[0]), human_bytes(sizes[-1]))))
    median = human_bytes(report.copy_bytes_median)
    line = f"  {report.num_copies} copies of {span}, median {median}, pages scattered"
    num_pairs = len({(route.source, route.target) for route in report.routes})
    if report.packed_pairs:
        line += (
            f"\n  packing chosen for {len(report.packed_pairs)} of {num_pairs} pairs of ranks: "
            f"{report.num_direct_copies} copies without it"
        )
    else:
        line += f"\n  packing chosen for none of {num_pairs} pairs of ranks"
    return "Copies\n" + line


def _costs(estimates: Sequence[Estimate], active_parameters: float | None) -> str:
    if active_parameters is None:
        title = (
            "Time, estimated (transfer alone: no parameter count is known, so no compute to hide it behind)"
        )
        links = [(f"{estimate.link_gbps} Gb/s", human_time(estimate.serial_s)) for estimate in estimates]
        return title + "\n" + columns([("link per rank", "transfer"), *links])
    title = (
        f"Time, estimated (prefill {human_time(estimates[0].overlapped.compute_s)}: "
        f"2 x {active_parameters:.3g} parameters per token at {FLOPS_PER_RANK / 1e12:.0f} TFLOP/s a rank, "
        "attention not counted)"
    )
    heads = ("link per rank", "transfer", "prefill, then transfer", "overlapped", "groups", "exposed")
    rows: list[tuple[str, ...]] = [(*heads, "efficiency", "bound")]
    for estimate in estimates:
        outcome = estimate.overlapped
        times = (outcome.transfer_s, estimate.serial_s, outcome.completion_s)
        rows.append(
            (
                f"{estimate.link_gbps} Gb/s",
                *(human_time(seconds) for seconds in times),
                str(estimate.num_groups),
                human_time(outcome.exposed_s),
                f"{outcome.efficiency:.3f}",
                f"{outcome.bound:.3f}",
            )
        )
    return title + "\n" + columns(rows)
