"""Timelines as a picture."""

from __future__ import annotations

import importlib

import pytest

from baton.observe import Interval, Timeline, Track, draw

STAGES = {"queue": (0.0, 0.1), "prefill": (0.1, 1.0), "exposed transfer": (1.0, 1.4), "admission": (1.4, 1.4)}


def timeline(name: str, stretch: float) -> Timeline:
    stages = [
        Interval(Track("request", stage), stage, start * stretch, stop * stretch)
        for stage, (start, stop) in STAGES.items()
    ]
    copies = [Interval(Track("source rank 0", "copy to 1"), "0 to 1", 0.2, end) for end in (0.5, 0.9)]
    compute = Interval(Track("source rank 0", "compute"), "layers 0-4", 0.1, 1.0)
    return Timeline(name, (*stages, compute, *copies))


def test_panels_share_their_axis_and_mark_what_sticks_out(tmp_path, monkeypatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    path = tmp_path / "new" / "t.png"
    assert draw([timeline("off", 2.0), timeline("on", 1.0)], path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = kept
    panels = figure.axes
    assert [axes.get_title("left") for axes in panels] == ["off", "on"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    assert panels[0].get_xlim()[1] >= 2800, "in ms, and up to the end of the slower one"
    for axes, end_ms in zip(panels, (2000, 1000), strict=True):
        rows = [label.get_text() for label in axes.get_yticklabels()]
        assert rows == ["request", "source rank 0: compute", "source rank 0: copy to 1"]
        assert [line.get_xdata()[0] for line in axes.lines] == [end_ms], "the end of prefill"
        (shade,) = axes.patches
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (end_ms, pytest.approx(1.4 * end_ms))
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["queue", "prefill", "compute", "copy", "exposed transfer", "admission", "end of prefill"]


def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch) -> None:
    honest = importlib.import_module

    def absent(name: str, *rest: str) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return honest(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert not draw([timeline("off", 1.0)], tmp_path / "t.png", "a title")
    assert list(tmp_path.iterdir()) == []
