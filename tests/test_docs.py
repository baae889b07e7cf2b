"""What the documents show is what the program says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from baton.plan import Cache, Component, Spec, parse_layout, plan
from baton.plan.cache import Dim, Full, Units
from baton.plan.ownership import buffers
from baton.plan.wire import storage_from_bytes

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_real_output() -> None:
    (example,) = (block for block in blocks("README.md", "") if block.startswith("$ baton plan"))
    command, shown = example.split("\n", 1)
    words = [sys.executable, "-m", "baton", *command.split()[2:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == shown


def test_the_readme_opens_with_the_two_commands() -> None:
    first = blocks("README.md", "")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_the_python_example_runs(capsys) -> None:
    (example,) = blocks("docs/plan.md", "python")
    exec(compile(example, "docs/plan.md", "exec"), {})
    assert capsys.readouterr().out.count("BoundRoute(") == 16


def test_the_storage_file_can_be_planned_with() -> None:
    (example,) = blocks("docs/plan.md", "json")
    storage = storage_from_bytes(example.encode())
    kv = Component("kv", ((0, 80),), Units(8), (Dim("channel", 256),), Full(), "tokens", "kv")
    spec = Spec(parse_layout("tp1"), Cache(80, (kv,)), storage)
    assert len(plan(spec, spec).routes) == 1
    assert buffers(spec, 0, "pool") == {"raw": 5242880000}


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    dead = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert dead == []
