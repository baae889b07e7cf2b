"""Every pair of layouts of a deployment, planned before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton.bench.handoff.scene import parse_speed
from baton.cli.deployment.options import BOTH, DECODE, PREFILL, Options
from baton.engine.config import EngineConfig, EngineSizes, derive_sizes
from baton.engine.pages import engine_storage
from baton.plan import Spec
from baton.plan.planner import plan
from baton.plan.printer import human_bytes
from baton.plan.report import Report
from baton.plan.routes import Prompt
from baton.plan.steps import PackCost

TOKENS_SHOWN = 1024


@dataclass(frozen=True, slots=True)
class Side:
    """One instance as it will be started."""

    name: str
    sizes: EngineSizes
    spec: Spec

    def line(self) -> str:
        """What was derived for it."""
        return f"{self.name}: {'; '.join(self.sizes.lines())}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A prefill and a decode instance, and what goes from the one to the other."""

    source: Side
    target: Side
    report: Report

    def line(self) -> str:
        """The pair in one line."""
        report, ends = self.report, (self.source, self.target)
        names = " to ".join(f"{side.name} ({side.spec.layout})" for side in ends)
        num_pairs = len({(route.source, route.target) for route in report.routes})
        packed = f"packed for {len(report.packed_pairs)} of them" if report.packed_pairs else "none packed"
        size = human_bytes(sum(report.bytes_by_source))
        return (
            f"{names}: {len(report.routes)} routes between {num_pairs} pairs of ranks, {packed}; "
            f"{size} for {report.prompt.num_tokens} tokens"
        )


def sides(options: Options) -> tuple[Side, ...]:
    """Every instance with what is derived for it; raises on a model, layout or number that cannot work."""
    if options.link is not None:
        parse_speed(options.link)
    first = PREFILL if options.decodes else BOTH
    found = []
    for role, layouts in ((first, options.prefills), (DECODE, options.decodes)):
        for index, layout in enumerate(layouts):
            config = _config(options, f"{role}-{index}", layout)
            sizes = derive_sizes(config)
            storage = engine_storage(sizes.cache, config.page_tokens, config.dtype)
            spec = Spec(sizes.layout, sizes.cache, storage.with_pages(dict(sizes.num_pages)))
            found.append(Side(config.name, sizes, spec))
    return tuple(found)


def pairs(options: Options, found: tuple[Side, ...]) -> tuple[Planned, ...]:
    """Every prefill instance with every decode instance; raises on a pair for which no hand-over exists."""
    split = len(options.prefills)
    return tuple(
        _planned(options.model, source, target) for source in found[:split] for target in found[split:]
    )


def _planned(model: str, source: Side, target: Side) -> Planned:
    num_tokens = min(TOKENS_SHOWN, source.sizes.context_max, target.sizes.context_max)
    report = Report(model, plan(source.spec, target.spec), Prompt(num_tokens, {}), PackCost())
    return Planned(source, target, report)


def _config(options: Options, name: str, layout: str) -> EngineConfig:
    engine = options.engine
    given: dict[str, Any] = {
        "transport": engine.transport,
        "policy": engine.overlap,
        "dtype": engine.dtype,
        "device": engine.device,
        "page_tokens": engine.page_tokens,
        "pool_tokens": engine.pool_tokens,
        "context_max": engine.context,
        "chunk_tokens": engine.chunk_tokens,
        "has_draft": engine.draft,
    }
    config = EngineConfig(options.model, layout, name)
    return replace(config, **{key: value for key, value in given.items() if value is not None})
