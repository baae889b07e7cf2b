"""The page of `baton plan --html`: its text, and what a real browser makes of it."""

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.browser import BROWSER, OPTIONS, needs_browser

from baton.cli.plan import render_page
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.report import Report, pages_needed
from baton.plan.routes import Prompt
from baton.plan.steps import PackCost
from baton.plan.storage import parse_storage

PAGED = "paged:layers=4,heads=4,dim=64"
LATENT = "latent:layers=61,dim=576"
HYBRID = "paged:layers=2,heads=8,dim=64+recurrent:layers=6,heads=16,state=4096"
WIDE = "latent:layers=64,dim=8"
HOSTILE = "</script><script>document.title='@@report@@'</script><!-- <img src=x onerror=alert(1)> & \"'"

VOID_TAGS = {"meta", "br", "hr", "img", "input", "link"}


class Element:
    """An element of a page with all the text inside it."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.text = ""

    def __getitem__(self, name: str) -> str | None:
        return self.attributes.get(name)


class Document(HTMLParser):
    """The elements of a page, in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def by_id(self, name: str) -> Element:
        return next(element for element in self.elements if element["id"] == name)

    def having(self, *names: str) -> list[Element]:
        return [element for element in self.elements if all(name in element.attributes for name in names)]


def make_report(model: str, source: str, target: str, tokens: int, held: int = 0) -> dict[str, Any]:
    cache = load_cache(model)
    groups = {part.group for part in cache.components if part.extent.has_tokens}
    prompt = Prompt(tokens, dict.fromkeys(sorted(groups), held) if held else {})
    specs = []
    for layout in (source, target):
        spec = Spec(parse_layout(layout), cache, parse_storage("hnd.apart.layer", 64, "bf16"))
        specs.append(Spec(spec.layout, cache, spec.storage.with_pages(pages_needed(spec, prompt))))
    return Report(model, plan(*specs, 0, 0), prompt, PackCost()).as_json()


def browse(folder: Path, page: str, fragment: str = "") -> Document:
    """The document after the page has drawn itself in a browser."""
    assert BROWSER is not None
    path = folder / "plan.html"
    path.write_text(page, encoding="utf-8")
    command = [BROWSER, *OPTIONS, "--dump-dom", f"--user-data-dir={folder / 'profile'}"]
    command += [path.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=True)
    document = Document(done.stdout)
    root = document.elements[0]
    assert root["data-error"] is None
    assert root["data-drawn"] == "yes"
    return document


def rows_of_matrix(document: Document) -> list[Element]:
    return [
        row
        for row in document.having("data-source")
        if row.tag == "tr" and "data-layers" not in row.attributes
    ]


def shares(document: Document, layer: int, unit: int) -> list[tuple[int, float]]:
    """Who sends one cell of the first drawing that has it, and which share of its tokens."""
    found = []
    for row in document.having("data-layers", "data-units", "data-share"):
        (first, last), (low, high) = (
            map(int, (row[name] or "").split(",")) for name in ("data-layers", "data-units")
        )
        if first <= layer < last and low <= unit < high:
            found.append((int(row["data-source"] or ""), float(row["data-share"] or "")))
    return found


def test_page_needs_nothing_from_outside() -> None:
    page = render_page(make_report(PAGED, "tp2", "cp2:stripe64.tp1", 200))
    assert not re.search(r"https?:|//[a-z0-9-]+\.|@import|url\(|import\(|fetch\(|XMLHttp", page)
    assert not Document(page).having("src")
    assert not Document(page).having("href")
    assert "default-src 'none'" in page


@pytest.mark.parametrize("name", [PAGED, HOSTILE])
def test_page_holds_the_report(name: str) -> None:
    report = make_report(PAGED, "tp2", "cp2:stripe64.tp1", 200, held=128) | {"model": name}
    document = Document(render_page(report))
    assert json.loads(document.by_id("report").text) == report


def test_hostile_name_stays_text() -> None:
    report = make_report(PAGED, "tp2", "tp1", 200)
    kind, hostile = (Document(render_page(report | {"model": name})) for name in (PAGED, HOSTILE))
    assert [element.tag for element in hostile.elements] == [element.tag for element in kind.elements]
    title = next(element for element in hostile.elements if element.tag == "title")
    assert title.text == f"{HOSTILE}: tp2 to tp1"


@needs_browser
def test_browser_shows_hostile_name_as_text(tmp_path: Path) -> None:
    document = browse(tmp_path, render_page(make_report(PAGED, "tp2", "tp1", 200) | {"model": HOSTILE}))
    assert document.by_id("model").text == HOSTILE
    assert not [element for element in document.elements if element.tag == "img"]


@pytest.mark.slow
@needs_browser
def test_small_matrix_and_stripes(tmp_path: Path) -> None:
    report = make_report(PAGED, "tp2", "cp2:stripe64.tp1", 200)
    document = browse(tmp_path, render_page(report), "#target=1&component=k")
    assert (document.by_id("matrix")["data-rows"], document.by_id("matrix")["data-columns"]) == ("2", "2")
    assert "2 source ranks by 2 target ranks" in (document.by_id("matrix")["aria-label"] or "")
    assert [row["data-source"] for row in rows_of_matrix(document)] == ["0", "1"]
    cells = [(cell["data-target"], cell["data-bytes"]) for cell in document.having("data-bytes")]
    assert cells == [("0", "262144"), ("1", "147456")] * 2
    assert document.by_id("gets").text == "Target 1 gets 288 KiB in 4 routes from 2 sources."
    assert [shares(document, 3, unit) for unit in range(4)] == [
        [(0, 1.0)],
        [(0, 1.0)],
        [(1, 1.0)],
        [(1, 1.0)],
    ]
    assert "k, layer 0, unit 0: source 0 sends 72 tokens." in document.by_id("spot").text
    assert document.by_id("routes-title").text == "Routes: all 8"


@pytest.mark.slow
@needs_browser
def test_mirrors_share_a_cell_by_tokens(tmp_path: Path) -> None:
    document = browse(tmp_path, render_page(make_report(LATENT, "tp8", "tp1", 4096)))
    assert shares(document, 60, 0) == [(rank, 0.125) for rank in range(8)]


@pytest.mark.slow
@needs_browser
def test_state_has_a_drawing_of_its_own(tmp_path: Path) -> None:
    document = browse(tmp_path, render_page(make_report(HYBRID, "tp4", "tp2.cp2", 1000)), "#target=3")
    assert [element["data-component"] for element in document.having("data-component")] == ["k v", "ssm"]
    assert shares(document, 7, 8) == [(2, 1.0)]
    assert "state without tokens" in document.by_id("panels").text


@pytest.mark.slow
@needs_browser
def test_idle_sources_and_nothing_to_send(tmp_path: Path) -> None:
    document = browse(tmp_path, render_page(make_report(LATENT, "tp8", "tp1", 100)))
    assert "Idle sources: 2\u20137." in document.by_id("load").text
    document = browse(tmp_path, render_page(make_report(PAGED, "tp2", "tp4", 128, held=128)))
    assert document.by_id("load").text == "Nothing is sent: the target holds everything already."


@pytest.mark.slow
@needs_browser
def test_other_dp_groups_are_left_out(tmp_path: Path) -> None:
    document = browse(tmp_path, render_page(make_report(PAGED, "dp2.tp2", "dp4", 200)))
    assert [row["data-source"] for row in rows_of_matrix(document)] == ["0", "1"]
    assert document.by_id("matrix")["data-columns"] == "1"
    assert "left out" in document.by_id("load").text


@pytest.mark.slow
@needs_browser
def test_a_thousand_ranks(tmp_path: Path) -> None:
    report = make_report(WIDE, "pp16.tp64", "pp8.cp2.tp64", 8192)
    document = browse(tmp_path, render_page(report), "#target=1023")
    assert len(rows_of_matrix(document)) == 1024
    sent = sorted((r["source"], r["layers"]) for r in report["routes"] if r["target"] == 1023)
    assert sent
    for source, layers in sent:
        assert shares(document, layers[0][0], 0) == [(source, 1.0)]
    assert document.by_id("routes-title").text.startswith("Routes: the first 200 of ")


@pytest.mark.slow
@needs_browser
def test_keys_move_and_choose(tmp_path: Path) -> None:
    keys = """<script>for (const key of ["ArrowRight", "+", "Escape", "ArrowRight", "Enter"])
        document.getElementById("matrix").dispatchEvent(new KeyboardEvent("keydown", { key }));</script>"""
    page = render_page(make_report(PAGED, "tp2", "cp2:stripe64.tp1", 200))
    document = browse(tmp_path, page.replace("</body>", f"{keys}</body>"))
    assert document.by_id("readout").text.startswith("Source 0 \u2192 target 1")
    assert document.by_id("gets").text.startswith("Target 1 ")
