"""The Grafana dashboard and the alert rules in deploy/ ask for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.serving.fleet import Fleet
from baton.serving.metrics import RouterMetrics, ServerMetrics
from baton.serving.wire import BatonWire
from baton.session.registry import Role

yaml = pytest.importorskip("yaml", reason="no PyYAML here to read the rules with")

DEPLOY = Path(__file__).parents[2] / "deploy"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OF_SCRAPES = {"instance", "job", "le"}
ROUTER_PAGE = (DEPLOY.parent / "docs/router.md").read_text()
VALUES = {
    "path": set(BatonWire.paths),
    "role": {role.value for role in Role},
    "state": {"able", "draining", "leaving", "loading", "unhealthy"}
    | {"free", "cached", "used", "leased", "quarantined"},
    "reason": set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", ROUTER_PAGE, re.MULTILINE)))),
    "phase": {"prefill", "decode"},
    "kind": {"drafted", "accepted"},
}
"""What a label that is selected by can be, where the values are known."""
UNUSED = {
    "baton_e2e_request_latency_seconds": "for dashboards of vLLM, which has it",
    "baton_request_queue_time_seconds": "for dashboards of vLLM; hand-overs have the stage queue",
    "baton_requests": "the router counts them",
    "baton_failures": "the router counts them",
    "baton_exposed_seconds": "the dashboard has its distribution, as a stage",
    "baton_ready": "a router has it as the state of the instance",
}
"""Metrics that no panel and no rule shows, and why."""


def known() -> dict[str, set[str]]:
    """By the name of a sample: its labels."""
    found: dict[str, set[str]] = {}
    registry = ServerMetrics("m")._registry
    collectors: list[Any] = list(registry._collector_to_names)
    # An instance adds the model to every sample when it is read.
    labels = {name: {*each._labelnames, "model_name"} for each in collectors if hasattr(each, "_labelnames")
              for name in registry._collector_to_names[each]}  # fmt: skip
    for families in (registry.collect(), RouterMetrics(Fleet()).collect()):
        for family in families:
            of_family = labels.get(family.name, set(getattr(family, "_labelnames", ())))
            for suffix in SUFFIXES[family.type]:
                found[family.name + suffix] = of_family
    return found


def problems(expression: str) -> Iterator[str]:
    """What is wrong with a PromQL expression, as far as names go."""
    metrics = known()
    names = re.findall(r"\bbaton_\w+", expression)
    if not names:
        yield f"no metric of ours in {expression}"
    yield from (f"no metric {name}" for name in names if name not in metrics)
    labels = OF_SCRAPES.union(*(metrics.get(name, set()) for name in names))
    used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    for group in re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", expression):
        used += re.findall(r"\w+", group)
    yield from (f"no label {label} in {expression}" for label in used if label not in labels)
    for label, operator, text in re.findall(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"", expression):
        values = VALUES.get(label)
        if values and "$" not in text:
            yield from (f"no {label} {value}" for value in text.split("|") if value not in values)
        if label == "path" and (operator != "=~" or {*text.split("|")} != values):
            yield f"not every path that is counted, and only these: {text}"
    if expression.count("(") != expression.count(")"):
        yield f"parentheses do not match in {expression}"


def expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/baton.json").read_text())["panels"]
    rules = yaml.safe_load((DEPLOY / "prometheus/baton.rules.yaml").read_text())["groups"][0]["rules"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return found + [rule["expr"] for rule in rules]


def test_the_checker_sees_what_is_wrong():
    for expression, words in (
        ("sum(rate(baton_router_failures[5m]))", "no metric baton_router_failures"),
        ("sum by (reason) (baton_router_failures_total)", "no label reason"),
        ('baton_pages{status="free"}', "no label status"),
        ("sum(baton_pages", "parentheses"),
        ("up == 0", "no metric of ours"),
        ('baton_router_requests_total{path=~"/v1/c.*"}', "no path /v1/c.*"),
        ('baton_router_requests_total{path=~"/v1/completions"}', "not every path"),
        ('baton_pages{state="full"}', "no state full"),
        ('baton_router_local_prefills_total{reason=~"no_prefill|none"}', "no reason none"),
    ):
        assert any(words in problem for problem in problems(expression)), expression


def test_every_expression_asks_for_what_exists():
    assert len(expressions()) > 40
    assert [problem for each in expressions() for problem in problems(each)] == []


def test_every_sample_has_the_name_of_its_model():
    assert [name for name, labels in known().items() if "model_name" not in labels] == []
    instance = [sample for family in ServerMetrics("m").collect() for sample in family.samples]
    assert {sample.labels["model_name"] for sample in instance} == {"m"}


def test_the_dashboard_can_be_limited_to_a_model():
    dashboard = json.loads((DEPLOY / "grafana/baton.json").read_text())
    (model,) = (each for each in dashboard["templating"]["list"] if each["name"] == "model")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"]).groups()
    assert label in known()[metric]
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for expression in targets:
        for selector in re.findall(r"\bbaton_\w+(\{[^}]*\})?", expression):
            assert 'model_name=~"$model"' in selector, expression


def test_rules_and_panels_are_whole():
    rules = yaml.safe_load((DEPLOY / "prometheus/baton.rules.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert {"summary", "remedy"} == set(rule["annotations"]), rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= OF_SCRAPES.union(*known().values()), rule["alert"]
    panels = json.loads((DEPLOY / "grafana/baton.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_metric_is_in_a_panel_or_a_rule():
    used = set(re.findall(r"\bbaton_\w+", " ".join(expressions())))
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known()}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used}
    assert families - shown == set(UNUSED)
    # Every metric of a failure or a hand-over is on the dashboard.
    text = (DEPLOY / "grafana/baton.json").read_text()
    for name in known():
        if name.startswith(("baton_router_", "baton_handoff")) and name.endswith(("_total", "_bucket")):
            assert name in text, name


def test_the_page_counts_answers_of_every_path():
    metrics = RouterMetrics(Fleet())
    for path in (*BatonWire.paths, "/v1/models", "/health"):
        metrics.count("requests", "m", path, "200")
    assert metrics.totals()["answers"] == len(BatonWire.paths)
